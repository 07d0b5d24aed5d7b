"""A room reaches the goal by mutants that its tests noticed, not by mutants that had no time."""

from __future__ import annotations

from collections import Counter

import pytest

from ops.mutation.judge import Verdict, is_goal_reached, report, share_noticed, share_unfinished


@pytest.mark.parametrize(
    ("counts", "noticed", "unfinished", "is_reached"),
    [
        ({Verdict.TESTS: 7, Verdict.TIME: 1, Verdict.TYPES: 1, Verdict.SURVIVED: 1}, 0.9, 0.0, True),
        ({Verdict.TESTS: 8, Verdict.SURVIVED: 1}, 8 / 9, 0.0, False),
        ({Verdict.TESTS: 9, Verdict.UNFINISHED: 1}, 1.0, 0.1, True),
        # Seven of nine noticed ones would be 100 % of those that came to an end.
        ({Verdict.TESTS: 7, Verdict.UNFINISHED: 2}, 1.0, 2 / 9, False),
        ({Verdict.UNFINISHED: 3}, None, 1.0, False),
        # Mutants without effect make neither share smaller.
        ({Verdict.TESTS: 1, Verdict.UNFINISHED: 1, Verdict.CRASHED: 9, Verdict.EQUIVALENT: 9}, 1.0, 0.5, False),
        ({Verdict.CRASHED: 2, Verdict.EQUIVALENT: 1}, None, 0.0, True),
    ],
)
def test_goal_needs_noticed_mutants_and_few_unfinished_ones(
    counts: dict[Verdict, int], noticed: float | None, unfinished: float, is_reached: bool
) -> None:
    counted = Counter(counts)
    assert share_noticed(counted) == (None if noticed is None else pytest.approx(noticed))
    assert share_unfinished(counted) == pytest.approx(unfinished)
    assert is_goal_reached(counted) == is_reached


def test_report_shows_both_shares_and_names_the_rooms_that_missed_the_goal() -> None:
    rooms = {
        "gateway.fleet": Counter({Verdict.TESTS: 10}),
        "gateway.files": Counter({Verdict.TESTS: 3, Verdict.UNFINISHED: 1}),
        "gateway.usage": Counter({Verdict.TESTS: 1, Verdict.SURVIVED: 1}),
    }
    _, fleet, files, usage, goal = report(rooms).splitlines()
    assert [line.split()[-2:] for line in (fleet, files, usage)] == [["0%", "100%"], ["25%", "100%"], ["0%", "50%"]]
    assert goal.endswith("at most 10% unfinished; missed: gateway.files, gateway.usage")
