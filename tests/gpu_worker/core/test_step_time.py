import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.sequence import MAX_PARTS, Sequence, SequenceRecord, SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, StepResult
from gpu_worker.core.step_time import _FIRST_DEVIATION, DeviceTime, StepTimeModel
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.core.harness import Harness, StepCost
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


def test_token_that_a_slow_first_step_made_expensive_is_corrected_by_few_steps() -> None:
    """Durations as a tiny model had them: the first step warms up, then streams decode, then prompts come."""
    model = StepTimeModel()
    model.observe(1, 0, 15, 11.6e-3)
    model.observe(8, 0, 56, 10.3e-3)
    for _ in range(30):
        model.observe(8, 0, 0, 1.9e-3)
    for _ in range(8):
        model.observe(10, 0, 246, 21e-3)
    assert model.predict(10, 0, 246) == pytest.approx(21e-3, rel=0.2)
    assert model.token_s == pytest.approx(78e-6, rel=0.3)


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


class KnownCosts(StepTimeModel):
    costs_s = (10.0, 2.0, 4.0, 1.0)
    token_s = 1.0


def share(duration_s: float, *items: tuple[Sequence, int, SampledTokens], num_decodes: int = 0) -> None:
    scheduled = [ScheduledSequence(each, 0, count, samples=True) for each, count, _ in items]
    step = ScheduledStep(1, scheduled, 0, num_decodes=num_decodes, num_batch=sum(s.lane == "batch" for s, *_ in items))
    shares = DeviceTime(KnownCosts())
    shares.find_payers(step)
    shares.share(step, StepResult(1, [sampled for *_, sampled in items]), duration_s, 100.0)


def test_shares_are_as_the_scheduler_expects_tokens_to_cost() -> None:
    people, job, prompt = make_sequence(5), make_sequence(5, lane="batch"), make_sequence(9)
    drafts = SampledTokens((1, 2), num_drafted=4, num_accepted=1)
    share(66.0, (people, 1, drafts), (job, 1, SampledTokens((1,))), (prompt, 9, SampledTokens((1,))), num_decodes=2)
    # A third of 10, of each its lane's 2 or 4, and 1 for each token beyond the first: 33 in all, and the step took 66.
    weights = [10 / 3 + 2 + 4, 10 / 3 + 4, 10 / 3 + 2 + 8]
    expected = [66 * weight / sum(weights) for weight in weights]
    assert [each.record.device_s for each in (people, job, prompt)] == pytest.approx(expected)
    assert people.record.rejected_s == pytest.approx(expected[0] * 3 / weights[0])
    assert prompt.record.prefill_s == pytest.approx(expected[2])
    (part,) = prompt.record.prefills
    assert (part.began_at, part.landed_at, part.num_tokens) == (34.0, 100.0, 9)


def test_sequence_that_has_ended_pays_for_no_more_steps() -> None:
    ended, other = make_sequence(5), make_sequence(5)
    ended.status = SequenceStatus.FINISHED
    share(3.0, (ended, 1, SampledTokens((1,))), (other, 1, SampledTokens((1,))), num_decodes=2)
    assert (ended.record.device_s, other.record.device_s) == (0.0, pytest.approx(3.0))


def test_record_of_a_very_long_prompt_stays_small() -> None:
    record = SequenceRecord()
    for number in range(1000):
        record.prefill(number * 8, 8, 0.5, number, number + 1)
        record.preempt(number, float(number))
    assert len(record.prefills) == len(record.preempted_at) == MAX_PARTS
    assert sum(part.num_tokens for part in record.prefills) == 8000
    assert record.prefills[-1].landed_at == 1000
    assert record.prefill_s == 500


def half_right(tokens: list[int]) -> list[int]:
    return [*tokens[:1], *(token + 1 for token in tokens[1:])]


def run_load(seed: int, *, in_flight: int, has_drafts: bool) -> tuple[float, float, list[Sequence]]:
    """Return what steps took, what of it was left to a step that did not follow, and the sequences of a random load."""
    draw = random.Random(seed)
    cost = StepCost(draw.uniform(0.001, 0.02), draw.uniform(0.0001, 0.01), draw.uniform(0.00001, 0.002))
    policy, drafter = (FixedDepth(3), half_right) if has_drafts else (None, None)
    sizes = {"num_blocks": 24, "max_num_seqs": 5, "max_steps_in_flight": in_flight}
    harness = Harness(cost=cost, policy=policy, drafter=drafter, **sizes)
    sequences: list[Sequence] = []
    busy_s = unpaid_s = 0.0
    for _ in range(10_000):
        if len(sequences) < 25 and draw.random() < 0.4:
            lane = draw.choice(("interactive", "interactive", "batch"))
            sequences.append(make_sequence(draw.randint(1, 30), max_tokens=draw.randint(1, 25), lane=lane))  # type: ignore[arg-type]
            harness.add(sequences[-1])
        if sequences and draw.random() < 0.02:
            harness.scheduler.abort(draw.choice(sequences).id)
        # A request that its client has left: its receipt is written, and the engine hears of it a step later.
        for closed in [each for each in sequences if each.record.is_closed]:
            harness.scheduler.abort(closed.id)
        if sequences and draw.random() < 0.02:
            draw.choice(sequences).record.is_closed = True
        while harness.can_submit() and (plan := harness.try_schedule()) is not None and plan.scheduled:
            pass
        if harness.in_flight:
            step = harness.in_flight[0][0]
            took_s = cost.of(step) if step.scheduled else 0.0
            busy_s += took_s
            payers = [item.sequence for item in step.scheduled if not item.sequence.record.is_closed]
            is_paid = any(each.status is not SequenceStatus.FINISHED for each in payers)
            unpaid_s = unpaid_s if not step.scheduled else 0.0 if is_paid else unpaid_s + took_s
            harness.now += took_s
            harness.land()
        if len(sequences) == 25 and not harness.scheduler.has_work():
            return busy_s, unpaid_s, sequences
    raise AssertionError("the load never ends")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 2), st.booleans())
def test_shares_of_random_loads_add_up_to_what_the_steps_took(seed: int, in_flight: int, has_drafts: bool) -> None:
    busy_s, unpaid_s, sequences = run_load(seed, in_flight=1 if has_drafts else in_flight, has_drafts=has_drafts)
    charged_s = sum(each.record.device_s for each in sequences)
    assert charged_s == pytest.approx(busy_s - unpaid_s, rel=1e-9)
    assert charged_s == pytest.approx(busy_s, rel=0.01)
    for each in sequences:
        record = each.record
        assert record.prefill_s + record.rejected_s <= record.device_s * (1 + 1e-9)
        assert record.recomputed_s <= record.prefill_s * (1 + 1e-9)
        assert bool(record.preempted_at) == bool(each.num_preemptions)


def test_what_is_computed_again_after_a_preemption_is_told() -> None:
    loads = [run_load(seed, in_flight=1, has_drafts=False)[2] for seed in range(4)]
    preempted = [each for sequences in loads for each in sequences if each.num_preemptions]
    assert preempted
    assert any(each.record.recomputed_s > 0 for each in preempted)
    assert all(not each.record.recomputed_s for load in loads for each in load if not each.num_preemptions)
