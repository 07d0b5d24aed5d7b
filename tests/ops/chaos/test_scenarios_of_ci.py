"""Which scenarios CI runs."""

from __future__ import annotations

from ops.chaos.scenarios import IN_TURN, QUICK, SCENARIOS, of_ci


def test_ci_runs_the_quick_scenarios_and_the_next_of_the_others_with_each_commit() -> None:
    assert not IN_TURN.keys() & QUICK.keys()
    beside = [of_ci(turn).items() - QUICK.items() for turn in range(40, 40 + len(IN_TURN))]
    assert all(len(each) == 1 for each in beside)
    assert set().union(*beside) == set(IN_TURN.items())
    for turn in range(len(IN_TURN)):
        assert QUICK.items() <= of_ci(turn).items()
        assert of_ci(turn).keys() <= SCENARIOS.keys()
