"""What sequences are charged adds up to what steps took."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.sequence import MAX_PARTS, Sequence, SequenceRecord, SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, StepResult
from gpu_worker.core.step_time import DeviceTime, StepTimeModel
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.core.harness import Harness, StepCost
from tests.gpu_worker.core.sequences import make_sequence


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
