"""Which scenarios CI runs."""

from __future__ import annotations

from ops.chaos.scenarios import IN_TURN, NUM_IN_TURN, QUICK, SCENARIOS, of_ci


def test_ci_runs_the_quick_scenarios_and_the_next_of_the_others_with_each_commit() -> None:
    assert not IN_TURN.keys() & QUICK.keys()
    assert {*IN_TURN, *QUICK} <= SCENARIOS.keys()
    beside = [of_ci(turn).items() - QUICK.items() for turn in range(40, 40 + len(IN_TURN) // NUM_IN_TURN + 1)]
    assert all(len(each) == NUM_IN_TURN for each in beside)
    assert set().union(*beside) == set(IN_TURN.items())
    assert all(QUICK.items() <= of_ci(turn).items() for turn in range(len(IN_TURN)))
