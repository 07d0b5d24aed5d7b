import random

import pytest

from gpu_worker.core.step import ScheduledSequence, ScheduledStep
from gpu_worker.core.step_time import _FIRST_DEVIATION, StepTimeModel
from tests.gpu_worker.core.sequences import make_sequence


def measured(steps: list[tuple[int, int, int]], costs_s: tuple[float, float, float, float]) -> StepTimeModel:
    """A model that has seen these steps, with noise and a disturbance in every hundredth."""
    noise, model = random.Random(1), StepTimeModel()
    for interactive, batch, more in steps:
        duration_s = costs_s[0] + costs_s[1] * interactive + costs_s[2] * batch + costs_s[3] * more
        duration_s *= noise.lognormvariate(0, 0.1) * (6.0 if noise.random() < 0.01 else 1.0)
        model.observe(interactive, batch, more, duration_s)
    return model


CPU = (0.75e-3, 0.18e-3, 0.18e-3, 0.06e-3)
GPU = (6e-3, 0.03e-3, 0.05e-3, 0.03e-3)


def test_parts_are_told_apart_by_steps_of_different_sizes() -> None:
    choice = random.Random(2)
    steps = [(choice.randint(0, 8), choice.randint(0, 80), choice.choice([0, 0, 100])) for _ in range(2000)]
    model = measured(steps, CPU)
    assert model.fixed_s == pytest.approx(CPU[0], rel=0.3)
    assert model.batch_sequence_s == pytest.approx(CPU[2], rel=0.15)
    assert model.token_s == pytest.approx(CPU[3], rel=0.15)


@pytest.mark.parametrize("costs_s", [CPU, GPU])
def test_steps_like_those_seen_are_predicted(costs_s: tuple[float, float, float, float]) -> None:
    model = measured([(1, 0, 0), (0, 40, 0), (1, 0, 30), (1, 50, 0)] * 500, costs_s)
    for interactive, batch, more in ((1, 0, 0), (0, 40, 0), (1, 0, 30), (1, 50, 0)):
        expected = costs_s[0] + costs_s[1] * interactive + costs_s[2] * batch + costs_s[3] * more
        assert model.predict(interactive, batch, more) == pytest.approx(expected, rel=0.1)


def test_small_parts_are_told_apart_from_a_large_fixed_one() -> None:
    choice = random.Random(3)
    kinds = [(1, 0, 0), (0, 1, 0), (1, 0, 20), (1, 30, 0)]
    model = measured([choice.choice(kinds) for _ in range(2000)], GPU)
    assert model.fixed_s == pytest.approx(GPU[0], rel=0.1)
    assert model.batch_sequence_s == pytest.approx(GPU[2], rel=0.3)
    assert model.token_s == pytest.approx(GPU[3], rel=0.3)


def test_parts_that_cannot_be_told_apart_stay_as_guessed() -> None:
    model = measured([(1, 0, 0)] * 500 + [(0, 1, 0)] * 5000, CPU)
    assert 0.3 < model.fixed_s / CPU[0] < 1.5
    assert 0.3 < model.batch_sequence_s / CPU[2] < 5.0


def test_machine_that_becomes_slower_is_followed() -> None:
    model = measured([(1, 0, 0)] * 1000, CPU)
    for _ in range(300):
        model.observe(1, 0, 0, 4e-3)
    assert model.predict(1, 0, 0) == pytest.approx(4e-3, rel=0.1)


def test_guess_that_is_far_too_high_is_corrected_by_few_steps() -> None:
    model = measured([(1, 0, 0)] * 1000, GPU)
    assert model.batch_sequence_s > 10 * GPU[2]
    for _ in range(5):
        model.observe(1, 50, 0, GPU[0] + GPU[1] + 50 * GPU[2])
    assert model.batch_sequence_s < 3 * GPU[2]


def test_single_disturbance_changes_little() -> None:
    model = measured([(1, 0, 0)] * 1000, CPU)
    before = model.predict(1, 0, 0)
    model.observe(1, 0, 0, 5.0)
    assert model.predict(1, 0, 0) < 1.02 * before


def test_first_step_sets_the_scale_and_no_time_at_all_is_ignored() -> None:
    model = StepTimeModel()
    model.observe(1, 0, 0, 0.0)
    assert not model.is_known
    model.observe(3, 2, 10, 0.5)
    assert model.predict(3, 2, 10) == pytest.approx(0.5)


def test_plan_is_counted_by_lane_and_by_tokens_beyond_the_first() -> None:
    plan = ScheduledStep(
        1,
        [
            ScheduledSequence(make_sequence(4), 4, 1, True),
            ScheduledSequence(make_sequence(4, lane="batch"), 4, 1, True),
            ScheduledSequence(make_sequence(20, lane="batch"), 0, 20, True),
        ],
        22,
        num_decodes=2,
        num_batch=2,
    )
    assert plan.num_prefilled == 19
    by_plan, by_counts = StepTimeModel(), StepTimeModel()
    by_plan.observe_step(plan, 5, 1.0)
    by_counts.observe(1, 2, 24, 1.0)
    assert by_plan.predict(7, 8, 9) == by_counts.predict(7, 8, 9)


def test_batch_sequence_is_never_taken_for_cheaper_than_a_further_token() -> None:
    model = measured([(1, 0, 0), (1, 30, 0), (1, 0, 100)] * 300, (2e-3, 0.2e-3, 1e-9, 0.05e-3))
    assert model.predict(0, 1, 0) - model.fixed_s < 0.1 * model.token_s
    assert model.batch_sequence_s > 0.8 * model.token_s


def test_covariance_stays_one_however_long_parts_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that some hundred steps are as many as hundreds of thousands.
    monkeypatch.setattr("gpu_worker.core.step_time._DRIFT", 0.05)
    model = measured([(1, 2, 30)] * 100 + [(1, 0, 0)] * 600, CPU)
    rows = model._covariance
    for part, row in enumerate(rows):
        assert 0 < row[part] <= _FIRST_DEVIATION**2 * 1.001
        assert row == pytest.approx([other[part] for other in rows])


def test_of_steps_alike_in_a_row_one_in_four_is_taken_in() -> None:
    taken: list[tuple[int, int, int]] = []

    class Watched(StepTimeModel):
        def observe(self, num_interactive: int, num_batch: int, num_more_tokens: int, duration_s: float) -> None:
            taken.append((num_interactive, num_batch, num_more_tokens))
            super().observe(num_interactive, num_batch, num_more_tokens, duration_s)

    def plan(num_tokens: int) -> ScheduledStep:
        return ScheduledStep(1, [ScheduledSequence(make_sequence(num_tokens), 0, num_tokens, True)], num_tokens)

    model = Watched()
    for num_tokens in (1, 1, 1, 1, 1, 1, 9, 1, 1, 9):
        model.observe_step(plan(num_tokens), 0, 0.01)
    model.observe_step(plan(9), 3, 0.01)
    # The first of each kind at once, and of six alike the first and the fifth.
    assert taken == [(1, 0, 0), (1, 0, 0), (1, 0, 8), (1, 0, 0), (1, 0, 8), (1, 0, 11)]
