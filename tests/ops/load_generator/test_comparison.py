"""Differences are seen where there are some, and not where chance alone made them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ops.load_generator.comparison import compare, table
from ops.load_generator.record import Record, Report, ReportError
from ops.load_generator.summary import summarize


def report(seed: int, *, slower: float = 1.0, failed: float = 0.0, num: int = 250, **load: int) -> Report:
    """Return a run of a minute whose latencies are drawn, those of a second alike."""
    draw = random.Random(seed)
    moods = [draw.lognormvariate(0, 0.2) for _ in range(60)]
    records = []
    for number in range(num):
        at = 60 * number / num
        ttft_s = slower * moods[int(at)] * draw.lognormvariate(-3, 0.3)
        gaps = [slower * moods[int(at)] * draw.lognormvariate(-4, 0.3) for _ in range(8)]
        problem = "status 500" if draw.random() < failed else None
        records.append(Record(at, at, at + ttft_s + sum(gaps), 200, ttft_s, gaps, 5, None, 9, True, problem))
    figures = summarize(records, 60.0, {"ttft": 60})
    return Report(1, "", "u", "m", load, 60.0, 0, False, {"ttft": 60}, figures, records)


def verdicts(first: Report, second: Report) -> dict[str, str]:
    return {each.name: each.verdict for each in compare(first, second)}


def test_runs_that_differ_by_chance_show_no_difference() -> None:
    found = [verdicts(report(seed), report(seed + 10)) for seed in range(4)]
    for name in ("requests/s", "TTFT p50, ms", "ITL p99, ms"):
        # Of four intervals of 95 %, one may miss.
        assert sum(each[name] != "no difference seen" for each in found) <= 1


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        (lambda: report(2, slower=1.5), {"TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "TPOT p50, ms", "E2EL p50, ms"}),
        (lambda: report(2, failed=0.2), {"completed, %"}),
    ],
)
def test_difference_is_seen_in_its_direction(change: Callable[[], Report], worse: set[str]) -> None:
    there, back = verdicts(report(1), change()), verdicts(change(), report(1))
    assert {there[name] for name in worse} == {"worse"}
    assert {back[name] for name in worse} == {"better"}
    assert "worse" not in back.values()


def test_interval_holds_the_ratio_of_the_figures() -> None:
    first, second = report(1), report(2, slower=1.3)
    for each in compare(first, second):
        assert each.ratio is not None
        ratio, low, high = each.ratio
        assert low <= ratio <= high
        assert each.first is not None
        assert each.second == pytest.approx(ratio * each.first)
    by_name = {each.name: each.first for each in compare(first, second)}
    assert by_name["TTFT p99, ms"] == pytest.approx(first.summary["ttft_p99_ms"], abs=0.001)
    assert by_name["requests/s"] == pytest.approx(first.summary["requests_per_s"], abs=0.001)


def test_different_loads_are_told_and_few_requests_refused() -> None:
    lines = table(report(1, requests=3), report(1, requests=4, turns=2))
    assert lines[-1] == "A and B had different loads: requests 3 and 4; turns None and 2."
    with pytest.raises(ReportError, match="B has 10 completed requests; intervals need 20 at least"):
        compare(report(1), report(1, num=10))
