"""Sequences whose output must look like something: planned with their last token known, ended by their constraint."""

from __future__ import annotations

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.core.harness import Harness
from tests.gpu_worker.core.sequences import make_sequence


class Countdown:
    """Allows everything, and is complete after some tokens; or refuses the last of them with an error."""

    def __init__(self, num_tokens: int, error: str | None = None, forced: tuple[int, ...] = ()) -> None:
        self.forced = list(forced)
        self.taken: list[int] = []
        self.num_tokens = num_tokens
        self.late_error = error

    @property
    def error(self) -> str | None:
        return self.late_error if len(self.taken) >= self.num_tokens else None

    @property
    def is_at_fault(self) -> bool:
        return self.error is not None

    @property
    def is_complete(self) -> bool:
        return self.error is None and len(self.taken) >= self.num_tokens

    def advance(self, token_id: int) -> bool:
        if self.error is None:
            self.taken.append(token_id)
        return self.error is None

    def advance_inside(self, token_id: int) -> bool:
        return len(self.taken) + 1 < self.num_tokens and self.advance(token_id)

    def fill_mask(self, drafts: tuple[int, ...], address: int) -> None:
        raise AssertionError("there is no sampler here")

    def allows(self, drafts: tuple[int, ...]) -> bool:
        return True

    def forced_tokens(self) -> list[int]:
        return self.forced

    def some_allowed(self, number: int) -> int:
        raise AssertionError("nobody asks")


def constrained(prompt: int, num_tokens: int = 6, **options: object) -> Sequence:
    sequence = make_sequence(prompt, **options)  # type: ignore[arg-type]
    sequence.constraint = Countdown(num_tokens)
    return sequence


def names(plan: ScheduledStep) -> list[str]:
    return [item.sequence.id for item in plan.scheduled]


def test_constraint_is_kept_no_longer_than_its_sequence() -> None:
    harness, sequences = Harness(), [constrained(5), constrained(5, num_tokens=50)]
    harness.add(*sequences)
    harness.step()
    harness.scheduler.abort(sequences[1].id)
    harness.run()
    assert not harness.scheduler._live._constraints._by_id


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_constrained_sequence_is_never_planned_behind_a_step_that_samples_for_it(depth: int) -> None:
    harness = Harness(max_steps_in_flight=depth, max_num_batched_tokens=12)
    forbidding = make_sequence(5)
    forbidding.bad_words = ((1, 2),)
    sequences = [constrained(20), constrained(3), make_sequence(9), constrained(6, lane="batch"), forbidding]
    harness.add(*sequences)
    num_both = 0
    while harness.scheduler.has_work():
        harness.step()
        for plan, _ in harness.in_flight:
            for item in plan.scheduled:
                is_known = item.start + item.num_tokens <= len(item.sequence.token_ids)
                assert is_known or (item.sequence.constraint is None and item.sequence is not forbidding)
        num_both += len(harness.in_flight) > 1
        harness.scheduler.check_integrity()
    for sequence in sequences:
        tokens, _ = harness.reference(sequence)
        if sequence.constraint is None:
            assert harness.output[sequence.id] == tokens
        else:
            assert harness.output[sequence.id] == tokens[:6]
            assert harness.finish[sequence.id] == "stop"
            assert sequence.constraint.taken == tokens[:6]  # type: ignore[attr-defined]
    assert num_both or depth < 3, "no step was planned behind another"


def test_others_go_on_behind_a_step_with_a_constrained_sequence() -> None:
    harness = Harness(max_steps_in_flight=2)
    mine, other = constrained(3), make_sequence(3)
    harness.add(mine, other)
    assert names(harness.schedule()) == [mine.id, other.id]
    assert names(harness.schedule()) == [other.id]
    harness.land()
    assert names(harness.schedule()) == [mine.id, other.id]


def test_nothing_is_planned_behind_a_step_with_constrained_sequences_alone() -> None:
    harness = Harness(max_steps_in_flight=2)
    harness.add(constrained(3))
    harness.schedule()
    assert harness.try_schedule() is None
    harness.land()
    assert len(harness.schedule().scheduled) == 1


def test_batch_work_does_not_go_on_alone_while_people_wait_for_their_last_token() -> None:
    harness = Harness(max_steps_in_flight=2, batch_slowdown=1000)
    mine, batch = constrained(3), make_sequence(3, lane="batch")
    harness.add(mine, batch)
    for _ in range(3):
        assert set(names(harness.schedule())) == {mine.id, batch.id}
        assert harness.try_schedule() is None
        harness.land()


def test_prompt_of_a_constrained_sequence_is_computed_ahead_in_chunks() -> None:
    harness = Harness(max_steps_in_flight=2, max_num_batched_tokens=4)
    mine = constrained(8)
    harness.add(mine)
    assert names(harness.schedule()) == [mine.id]
    assert names(harness.schedule()) == [mine.id]
    harness.land()
    assert harness.try_schedule() is None, "its first token is being sampled"


def test_step_that_verifies_forced_tokens_is_alone_and_covers_them() -> None:
    harness = Harness(max_steps_in_flight=2, num_blocks=8, max_num_batched_tokens=32, headroom_tokens=0)
    mine, other = make_sequence(3, max_tokens=40), make_sequence(15)
    mine.constraint = Countdown(30, forced=(7,) * 40)
    harness.add(mine, other)
    harness.settle(harness.schedule())
    plan = harness.schedule()
    (item,) = (item for item in plan.scheduled if item.sequence is mine)
    assert plan.is_alone
    assert item.forced == (7,) * item.num_draft_tokens
    assert item.num_draft_tokens == 4 * (8 - 4) - item.start - 1, "as many as the blocks that are left hold"
    assert len(mine.block_table) == 4
    assert harness.try_schedule() is None
    harness.settle_as(9)
    assert len(mine.block_table) == 2, "blocks of what was not accepted go back"
    harness.scheduler.check_integrity()


def test_step_that_verifies_a_single_forced_token_is_alone() -> None:
    harness = Harness(max_steps_in_flight=2)
    mine = make_sequence(3, max_tokens=40)
    mine.constraint = Countdown(30, forced=(7,))
    harness.add(mine)
    harness.settle(harness.schedule())
    plan = harness.schedule()
    assert ([item.num_draft_tokens for item in plan.scheduled], plan.is_alone) == ([1], True)
    assert harness.try_schedule() is None


def test_forced_tokens_are_neither_learned_nor_counted_as_drafts() -> None:
    harness = Harness(policy=FixedDepth(0))
    mine = make_sequence(3, max_tokens=20)
    mine.constraint = Countdown(10, forced=(7, 8, 9))
    harness.add(mine)
    harness.settle(harness.schedule())
    plan, _ = harness.in_flight[0] if harness.in_flight else (harness.schedule(), None)
    harness.in_flight.popleft()
    sampled = SampledTokens((7, 8, 9, 10), num_drafted=3, num_accepted=3)
    harness.collect(harness.scheduler.settle(plan, StepResult(plan.step, [sampled])))
    assert mine.token_ids[-4:] == [7, 8, 9, 10]
    assert mine.num_computed_tokens == len(mine.token_ids) - 1
    assert (mine.num_drafted_tokens, mine.num_accepted_tokens) == (0, 0)
    assert harness.scheduler.speculation is not None
    assert harness.scheduler.speculation.num_draft_tokens == 0
    harness.scheduler.check_integrity()


def test_complete_output_that_another_worker_has_emitted_only_ends() -> None:
    harness = Harness()
    sequence = make_sequence(3, emitted=[5, 6])
    sequence.constraint = Countdown(0)
    harness.add(sequence)
    harness.step()
    assert (harness.output[sequence.id], harness.finish[sequence.id]) == ([5, 6], "stop")


def test_constraint_with_an_error_ends_its_sequence_alone() -> None:
    harness = Harness()
    mine, other = make_sequence(3), make_sequence(3)
    mine.constraint = Countdown(3, "too hard")
    harness.add(mine, other)
    events = []
    while harness.scheduler.has_work():
        events += harness.step()
    (last,) = (event for event in events if event.sequence is mine and event.finish)
    assert (last.finish, last.error, last.token_ids) == ("failed", "too hard", ())
    assert harness.output[mine.id] == harness.reference(mine)[0][:2]
    harness.assert_reference(other)
    assert harness.scheduler.stats.free_blocks == harness.scheduler.stats.total_blocks
