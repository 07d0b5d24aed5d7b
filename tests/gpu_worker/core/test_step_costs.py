"""Costs of depths, measured on a machine whose speed changes."""

from __future__ import annotations

import pytest

from gpu_worker.core.step_costs import FIRST_PLAIN_STEPS, MEASURED_STEPS, StepCosts


def measure(costs: StepCosts, depth: int, duration_s: float, *, is_exploration: bool = True) -> None:
    is_first = depth == 0 and not costs.is_known
    for _ in range(FIRST_PLAIN_STEPS if is_first else MEASURED_STEPS):
        costs.measure(depth, duration_s, is_exploration=is_exploration)


def ratios(costs: StepCosts) -> list[float]:
    known = costs.all()
    return [cost / known[0] for cost in known]


def test_nothing_is_known_before_steps_without_drafts_were_measured() -> None:
    costs = StepCosts(3)
    measure(costs, 2, 1.0)
    assert not costs.is_known
    measure(costs, 0, 1.0)
    assert costs.is_known


def test_costs_reach_twice_as_deep_as_what_was_measured() -> None:
    costs = StepCosts(5)
    measure(costs, 0, 1.0)
    assert costs.all() == [1.0]
    assert costs.all(is_exploration=True) == [1.0, 1.0]
    measure(costs, 1, 1.2)
    assert costs.all() == pytest.approx([1.0, 1.2, 1.4])
    assert costs.all(is_exploration=True) == pytest.approx([1.0, 1.2, 1.2])


def test_costs_between_and_behind_measured_depths_lie_on_lines() -> None:
    costs = StepCosts(5)
    measure(costs, 0, 1.0)
    measure(costs, 3, 1.6)
    assert costs.all() == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])


def test_first_step_of_a_depth_and_one_that_was_disturbed_do_not_spoil_its_cost() -> None:
    costs = StepCosts(1)
    measure(costs, 0, 1.0)
    for duration_s in (50.0, 1.5, 90.0, 1.5):
        costs.measure(1, duration_s, is_exploration=True)
    assert ratios(costs) == pytest.approx([1.0, 1.5])


def test_one_long_step_moves_the_pace_little() -> None:
    costs = StepCosts(1)
    measure(costs, 0, 1.0)
    costs.measure(0, 1e9, is_exploration=False)
    measure(costs, 1, 1.5)
    assert ratios(costs) == pytest.approx([1.0, 1.5], rel=0.1)


@pytest.mark.parametrize("speed", [0.3, 3.0])
def test_a_machine_that_gets_slower_or_faster_changes_no_ratio(speed: float) -> None:
    costs = StepCosts(1)
    measure(costs, 0, 1.0)
    measure(costs, 1, 1.5)
    for _ in range(100):
        costs.measure(0, speed, is_exploration=False)
    assert ratios(costs) == pytest.approx([1.0, 1.5])
    measure(costs, 1, 1.5 * speed)
    assert ratios(costs) == pytest.approx([1.0, 1.5], rel=0.03)


def test_ratio_that_changes_is_followed_by_exploration_of_either_depth() -> None:
    costs = StepCosts(1)
    measure(costs, 0, 1.0)
    measure(costs, 1, 1.5)
    for _ in range(8):
        for _ in range(60):
            costs.measure(1, 1.5, is_exploration=False)
        measure(costs, 0, 1.3)
    assert ratios(costs) == pytest.approx([1.0, 1.5 / 1.3], rel=0.02)


def test_exploration_is_put_off_after_steps_of_another_size() -> None:
    costs = StepCosts(1)
    costs.resume()
    assert costs.until_exploration == 0
    measure(costs, 0, 1.0)
    costs.resume()
    assert costs.until_exploration > 20


def test_an_exploration_needs_what_the_one_before_has_lost_and_at_least_a_step() -> None:
    costs = StepCosts(1)
    measure(costs, 0, 2.0)
    assert costs.exploration_s == MEASURED_STEPS * 2.0
    costs.price_s = 30.0
    assert costs.exploration_s == 30.0
    costs.price_s = -5.0
    assert costs.exploration_s == 2.0


def test_long_steps_count_alike_for_the_pace_and_for_the_cost_of_a_depth() -> None:
    costs = StepCosts(1)
    measure(costs, 0, 1.0)
    for number in range(400):
        costs.measure(0, 1.5 if number % 4 == 0 else 1.0, is_exploration=False)
    for _ in range(8):
        for duration_s in (9.0, 1.8, 1.2, 1.2):
            costs.measure(1, duration_s, is_exploration=True)
    assert ratios(costs)[1] == pytest.approx(1.4 / 1.125, rel=0.05)
