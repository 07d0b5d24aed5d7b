"""Workers whose answers differ are told from those that differ by chance, and no other worker is blamed."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from gateway.telemetry.answer_counts import AnswerCounts, AnswerRow
from gateway.telemetry.drift import LIMIT, Finding, compare, psi

DAY_S = 86400.0


def answers(number: int, seed: int, *, worker: str = "w", revision: str = "r", shorter: float = 1.0) -> list[AnswerRow]:
    """Return the row of a worker whose answers have lengths as people's have, and end at 400 tokens."""
    rng, counts = random.Random(seed), AnswerCounts(lambda: DAY_S)
    for _ in range(number):
        length = int(rng.lognormvariate(5, 1) * shorter)
        logprob = -rng.gammavariate(4, 0.1)
        counts.add(("m", worker, revision), min(length, 400), "stop" if length < 400 else "length", logprob)
    return list(counts.documents()[0].rows)


def against_fleet(findings: list[Finding]) -> dict[str, str]:
    return {each.worker: each.verdict for each in findings if each.compared_with == "fleet"}


def test_index_is_that_of_its_definition_less_chance() -> None:
    one, other = [800, 200], [200, 800]
    # Twice 0.6 ln 4, and the 0.999 quantile of chi squared with one degree of freedom, 10.83, from tables.
    expected = 1.2 * math.log(4) - 10.83 * (1 / 1000 + 1 / 1000)
    assert psi(one, other) == pytest.approx(expected, abs=0.005)
    assert psi(one, one) == 0.0
    assert psi(one, [0, 49]) is None


def test_buckets_that_hold_less_than_a_tenth_join_the_next_and_the_last_the_one_before_it() -> None:
    assert psi([500, 80, 400, 20], [400, 100, 480, 20]) == psi([500, 500], [400, 600])
    # A tenth of the mean of both: in one it is rare, and not in the other, which has fewer answers.
    found = psi([500, 20, 480], [35, 30, 35])
    assert found is not None
    assert found > 0.5


@pytest.mark.parametrize("factor", [1, 10])
def test_worker_that_stops_too_early_is_seen_among_four_and_no_other(factor: int) -> None:
    # Short answers are soon given: it has more of them than the others.
    rows = [row for number in range(3) for row in answers(400, number, worker=f"w{number}")]
    rows += answers(400 * factor, 9, worker="early", shorter=0.2)
    assert against_fleet(compare(rows, [])) == {"w0": "same", "w1": "same", "w2": "same", "early": "differs"}


@pytest.mark.parametrize("number", [50, 100, 400])
def test_chance_raises_less_than_one_false_alarm_in_a_hundred(number: int) -> None:
    samples = [answers(number, seed)[0] for seed in range(1000 + 1)]
    pairs = [
        [psi(a, b) or 0.0 for a, b in zip(one.histograms, other.histograms, strict=True)]
        for one, other in pairwise(samples)
    ]
    assert sum(max(values) > LIMIT for values in pairs) < 10


def test_other_revision_and_other_day_are_compared_apart() -> None:
    now = answers(400, 1, worker="a") + answers(400, 2, worker="b", revision="r2", shorter=0.2)
    found = compare(now, answers(400, 3, worker="gone"))
    told = {(each.worker, each.compared_with): each.verdict for each in found}
    # Of each revision there is one worker today, and of the second none yesterday.
    assert told == {("a", "revision"): "differs", ("a", "yesterday"): "same", ("b", "revision"): "differs"}


def test_two_workers_that_differ_are_both_shown_and_few_answers_are_not_judged() -> None:
    pair = answers(400, 1, worker="a") + answers(400, 2, worker="b", shorter=0.2)
    assert against_fleet(compare(pair, [])) == {"a": "differs", "b": "differs"}
    few = answers(49, 1, worker="a", shorter=0.2) + answers(400, 2, worker="b")
    assert against_fleet(compare(few, [])) == {"a": "too few answers", "b": "too few answers"}


def test_worker_with_many_answers_counts_for_no_more_than_another_in_what_yesterday_was_like() -> None:
    past = [row for number in range(6) for row in answers(400, number, worker=f"w{number}")]
    past += answers(4000, 9, worker="early", shorter=0.2)
    (found,) = compare(answers(400, 10), past)
    assert (found.compared_with, found.verdict) == ("yesterday", "same")
