"""Differences are seen where there are some, and not where chance alone made them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ops.load_generator.comparison import compare, table
from ops.load_generator.record import Record, Report, ReportError
from ops.load_generator.summary import summarize
from ops.load_generator.summary import table as summary_table


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


@pytest.mark.parametrize(("num", "num_told"), [(1, 1), (2, 2), (10, 3), (99, 3), (100, 4)])
def test_percentile_of_too_few_requests_is_not_shown(num: int, num_told: int) -> None:
    [first_token] = [line for line in summary_table(report(1, num=num)) if line.startswith("Time to first token")]
    assert first_token.split()[4:].count("-") == 4 - num_told


@pytest.mark.parametrize(
    ("refused", "is_closed_loop", "load", "is_told"),
    [(1, True, {}, True), (0, True, {}, False), (1, False, {}, False), (1, True, {"max_concurrency": 4}, False)],
)
def test_refusals_of_requests_that_came_all_at_once_are_explained(
    refused: int, is_closed_loop: bool, load: dict[str, Any], is_told: bool
) -> None:
    found = report(1, **load)
    found.summary["refused"], found.is_closed_loop = refused, is_closed_loop
    assert any("All requests were sent at once" in line for line in summary_table(found)) is is_told


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
    first, second = report(1, failed=0.1), report(2, slower=1.3)
    for each in compare(first, second):
        assert each.ratio is not None
        ratio, low, high = each.ratio
        assert low <= ratio <= high
        assert each.first is not None
        assert each.second == pytest.approx(ratio * each.first)
    by_name = {each.name: each.first for each in compare(first, second)}
    assert by_name["TTFT p99, ms"] == pytest.approx(first.summary["ttft_p99_ms"], abs=0.001)
    for name, key in (("requests/s", "requests_per_s"), ("goodput, requests/s", "goodput_per_s")):
        assert by_name[name] == pytest.approx(first.summary[key], abs=0.001)
    assert by_name["output tokens/s"] == pytest.approx(first.summary["output_tokens_per_s"], abs=0.01)
    assert by_name["completed, %"] == pytest.approx(100 * first.summary["completed"] / 250)


@pytest.mark.parametrize(("goodput_ms", "back"), [({}, "cannot be told"), ({"ttft": 0.001}, "worse")])
def test_goodput_that_a_run_does_not_count_or_never_reaches_has_no_ratio(
    goodput_ms: dict[str, float], back: str
) -> None:
    first, second = report(1), report(2)
    first.goodput_ms = goodput_ms
    found = [verdicts(*pair)["goodput, requests/s"] for pair in ((first, second), (second, first))]
    assert found == ["cannot be told", back]


def test_different_loads_are_told_and_few_requests_refused() -> None:
    first, second = (
        report(1, failed=0.2, requests=3, users=1, tenants=7),
        report(1, num=500, requests=4, tenants=7, turns=2),
    )
    first.num_unfinished = 2
    first.load["goodput"], second.goodput_ms = "ttft:60", {}
    lines = table(first, second)
    lost = 252 - first.summary["completed"]
    completed = f"{first.summary['completed']} of 252 requests completed"
    assert lines[-4:] == [
        "A and B had different loads: --requests 3 and 4; --turns not set and 2; --users 1 and not set.",
        "A and B count goodput by different limits: --goodput ttft:60 and not set.",
        "A was interrupted: it has 250 of 252 requests, those of its beginning.",
        f"A: {completed}; {lost} were refused, failed or did not end, and latencies are of the completed ones.",
    ]
    row = next(line for line in lines if line.startswith("completed, %")).split()
    share = first.summary["completed"] / 250
    assert row[2:5] == [f"{100 * share:.2f}", "100.00", f"{1 / share:.3f}"]
    assert (row[6], row[-1]) == ("to", "better")
    with pytest.raises(ReportError, match="B has 10 completed requests; intervals need 20 at least"):
        compare(report(1), report(1, num=10))
