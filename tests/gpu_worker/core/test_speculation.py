"""Drafts in the plan: what they may take, and what becomes of the sequence when some of them are right."""

import pytest

from gpu_worker.core.draft import MAX_DRAFT_TOKENS, Draft
from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from ops.bench.spec.fixed_depth import FixedDepth
from tests.gpu_worker.core.harness import BLOCK, Harness
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import EOS, make_sequence


def right(tokens: list[int]) -> list[int]:
    return tokens


def wrong(tokens: list[int]) -> list[int]:
    return [token_id + 1 for token_id in tokens]


def drafting_harness(depth: int = 3, drafter=right, **sizes: object) -> Harness:  # type: ignore[no-untyped-def]
    return Harness(policy=FixedDepth(depth), drafter=drafter, **sizes)  # type: ignore[arg-type]


def test_right_drafts_take_fewer_steps_for_the_same_tokens() -> None:
    harness = drafting_harness(depth=3)
    harness.add(sequence := make_sequence(10, max_tokens=21, ignore_eos=True))
    harness.run_to_reference(sequence)
    assert harness.scheduler.step == 1 + 20 / 4
    speculation = harness.scheduler.speculation
    assert speculation is not None
    assert (speculation.num_drafts, speculation.num_draft_tokens, speculation.num_accepted_tokens) == (5, 15, 15)
    assert (sequence.num_drafted_tokens, sequence.num_accepted_tokens) == (15, 15)


def test_wrong_drafts_cost_no_step_and_no_token() -> None:
    harness = drafting_harness(depth=5, drafter=wrong)
    harness.add(sequence := make_sequence(10, max_tokens=9, ignore_eos=True))
    harness.run_to_reference(sequence)
    assert harness.scheduler.step == 9
    assert (sequence.num_accepted_tokens, sequence.num_drafted_tokens > 20) == (0, True)


def test_drafts_end_before_the_last_token_allowed() -> None:
    harness = drafting_harness(depth=10)
    harness.add(sequence := make_sequence(3, max_tokens=4, ignore_eos=True))
    harness.step()
    plan = harness.schedule()
    assert plan.scheduled[0].num_draft_tokens == 2
    harness.land()
    assert (len(harness.output[sequence.id]), harness.finish[sequence.id]) == (4, "length")


@pytest.mark.parametrize("state", [None, StateConfig(8, 64)], ids=["tokens", "state"])
def test_blocks_of_drafts_go_back_when_their_step_is_undone(state: StateConfig | None) -> None:
    harness = drafting_harness(depth=9, state=state)
    harness.add(sequence := make_sequence(3, max_tokens=30, ignore_eos=True))
    harness.step()
    assert harness.schedule().scheduled[0].num_draft_tokens == 9
    assert len(sequence.block_table) == 4
    harness.lose()
    assert len(sequence.block_table) == 1
    harness.scheduler.check_integrity()
    harness.run_to_reference(sequence)


def test_stop_token_among_accepted_drafts_ends_there() -> None:
    harness = drafting_harness(depth=8, vocab_size=5)
    lengths = {i: len(reference_tokens(b"tenant", [i, 7], 99, frozenset([EOS]), 5)[0]) for i in range(99)}
    prompt = next([i, 7] for i, length in lengths.items() if 3 < length < 7)
    harness.add(sequence := make_sequence(prompt, max_tokens=99))
    harness.run_to_reference(sequence)
    assert harness.finish[sequence.id] == "stop"
    assert harness.scheduler.step == 2
    assert sequence.num_accepted_tokens < sequence.num_drafted_tokens


def test_drafts_take_only_tokens_that_prompts_leave() -> None:
    harness = drafting_harness(depth=8, max_num_batched_tokens=10, max_num_seqs=4)
    harness.add(make_sequence(3, max_tokens=30, ignore_eos=True))
    harness.step()
    harness.add(make_sequence(15))
    assert [(i.num_tokens, i.num_draft_tokens) for i in harness.schedule().scheduled] == [(1, 0), (9, 0)]
    harness.land()
    assert [(i.num_tokens, i.num_draft_tokens) for i in harness.schedule().scheduled] == [(1, 3), (6, 0)]
    harness.land()


def test_blocks_of_wrong_drafts_are_free_after_the_step() -> None:
    harness = drafting_harness(depth=3 * BLOCK, drafter=wrong)
    harness.add(sequence := make_sequence(BLOCK - 1, max_tokens=50, ignore_eos=True))
    harness.step()
    harness.schedule()
    assert len(sequence.block_table) == 4
    harness.land()
    assert len(sequence.block_table) == 2
    harness.scheduler.check_integrity()


def test_drafts_shrink_to_the_blocks_that_are_free() -> None:
    harness = drafting_harness(depth=3 * BLOCK, num_blocks=4, headroom_tokens=0)
    harness.add(make_sequence(BLOCK - 1, max_tokens=12, ignore_eos=True), make_sequence(2 * BLOCK - 2, max_tokens=6))
    harness.step()
    assert [item.num_draft_tokens for item in harness.schedule().scheduled] == [BLOCK, 1]
    assert harness.scheduler.stats.free_blocks == 0
    harness.land()


@pytest.mark.parametrize("drafter", [right, wrong])
def test_nobody_is_preempted_for_drafts(drafter) -> None:  # type: ignore[no-untyped-def]
    def run(depth: int) -> tuple[Harness, list[Sequence]]:
        harness = drafting_harness(depth, drafter, num_blocks=16, headroom_tokens=0)
        sequences = [make_sequence([i] * 5, max_tokens=11, ignore_eos=True) for i in range(4)]
        harness.add(*sequences)
        harness.run_to_reference(*sequences)
        return harness, sequences

    assert run(9)[0].scheduler.stats.num_preemptions == run(0)[0].scheduler.stats.num_preemptions == 0


def test_preempted_sequence_with_accepted_drafts_continues_exactly() -> None:
    harness = drafting_harness(depth=3, num_blocks=8, headroom_tokens=0)
    sequences = [make_sequence([i] * 6, max_tokens=16, ignore_eos=True) for i in range(3)]
    harness.add(*sequences)
    harness.run_to_reference(*sequences)
    assert harness.scheduler.stats.num_preemptions > 0


def test_aborted_sequence_gives_back_the_blocks_of_its_drafts() -> None:
    harness = drafting_harness(depth=3 * BLOCK)
    harness.add(sequence := make_sequence(3, max_tokens=50, ignore_eos=True))
    harness.step()
    harness.schedule()
    harness.scheduler.abort(sequence.id)
    harness.land()
    assert sequence.status is SequenceStatus.FINISHED
    assert harness.scheduler.stats.free_blocks == harness.scheduler.stats.total_blocks


def test_expired_sequence_keeps_the_tokens_it_got() -> None:
    harness = drafting_harness(depth=3)
    harness.add(sequence := make_sequence(3, max_tokens=50, ignore_eos=True, deadline=2.0))
    harness.step()
    harness.step()
    harness.now = 3.0
    harness.step()
    assert (len(harness.output[sequence.id]), harness.finish[sequence.id]) == (5, "expired")
    assert harness.output[sequence.id] == harness.reference(sequence)[0][:5]


class BackingOff:
    """Drafts in one step, and then in none for some steps."""

    def __init__(self, depth: int, num_steps: int) -> None:
        self.depth, self.num_steps, self.num_left = depth, num_steps, 0
        self.is_drafting = False

    @property
    def is_backing_off(self) -> bool:
        return self.num_left > 0

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        if self.num_left:
            self.num_left -= 1
            return False
        return num_sequences > 0

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        self.is_drafting = not self.is_drafting
        if not self.is_drafting:
            self.num_left = self.num_steps
            return [0] * len(sequences)
        return [min(self.depth, limit) for limit in limits]

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        pass

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        pass


@pytest.mark.parametrize("drafter", [right, wrong])
def test_steps_follow_one_another_while_nothing_is_drafted_and_a_step_with_drafts_is_alone(drafter) -> None:  # type: ignore[no-untyped-def]
    harness = Harness(policy=BackingOff(3, 5), drafter=drafter, max_steps_in_flight=2)
    sequences = [make_sequence([i] * 5, max_tokens=30, ignore_eos=True) for i in range(3)]
    harness.add(*sequences)
    in_flight = {True: set[int](), False: set[int]()}
    while harness.scheduler.has_work():
        while harness.can_submit() and (plan := harness.try_schedule()) is not None and plan.scheduled:
            drafts = [item.num_draft_tokens > 0 for plan, _ in harness.in_flight for item in plan.scheduled]
            in_flight[any(drafts)].add(len(harness.in_flight))
        harness.land()
        harness.scheduler.check_integrity()
    harness.assert_reference(*sequences)
    assert in_flight == {True: {1}, False: {1, 2}}
    speculation = harness.scheduler.speculation
    assert speculation is not None
    assert speculation.num_draft_tokens > 0


def test_policy_that_never_drafts_costs_no_step_in_flight() -> None:
    harness = Harness(policy=FixedDepth(0), max_steps_in_flight=2)
    harness.add(sequence := make_sequence(6, max_tokens=20, ignore_eos=True))
    harness.step()
    while len(harness.output[sequence.id]) < 18:
        assert len(harness.in_flight) == 1
        harness.step()
    harness.run_to_reference(sequence)


def test_blocks_filled_by_accepted_drafts_are_found_by_the_next_prompt() -> None:
    harness = drafting_harness(depth=4)
    harness.add(first := make_sequence(6, max_tokens=14, ignore_eos=True))
    harness.run()
    harness.add(second := make_sequence(first.token_ids, max_tokens=2, ignore_eos=True))
    harness.run_to_reference(second)
    assert second.num_cached_tokens == 16


def test_policy_is_told_of_steps_whose_time_tells_nothing() -> None:
    told: list[bool] = []

    class Listening(BackingOff):
        def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
            told.append(is_changing)
            return False

    harness = Harness(policy=Listening(depth=1, num_steps=1))
    stream, short = make_sequence(4, max_tokens=20), make_sequence(4, max_tokens=1)
    harness.add(stream)
    for _ in range(2):
        harness.step()
    # Its prompt is computed beside the stream, and in the next step it has left.
    harness.add(short)
    for _ in range(3):
        harness.step()
    assert told == [True, False, True, True, False]


def test_policy_that_wants_more_than_a_sequence_may_have_gets_no_more() -> None:
    class Greedy(FixedDepth):
        def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
            return [9] * len(sequences)

    harness = Harness(policy=Greedy(9), drafter=right)
    harness.add(make_sequence(4, max_tokens=4, ignore_eos=True))
    harness.step()
    # It may have three more tokens, and the last of them is sampled, never drafted.
    assert [item.num_draft_tokens for item in harness.schedule().scheduled] == [2]


VOCAB = 5


def test_draft_ends_before_the_first_token_that_cannot_be_one() -> None:
    assert Draft((1, VOCAB, 1)).valid(VOCAB) == Draft((1,))
    assert Draft((1, -1, 1)).valid(VOCAB) == Draft((1,))
    assert len(Draft((1,) * 100).valid(VOCAB)) == MAX_DRAFT_TOKENS


def test_tokens_are_accepted_up_to_the_first_that_was_not_sampled() -> None:
    draft = Draft((1, 2, 3))
    for sampled, num_accepted in (((1, 2, 3, 4), 3), ((1, 2, 4, 3), 2), ((0, 2, 3, 4), 0)):
        assert draft.num_accepted(sampled) == num_accepted
    assert Draft().num_accepted((5,)) == 0


def test_each_row_is_sampled_behind_the_drafts_before_it() -> None:
    assert Draft((1, 2)).paths() == [(), (1,), (1, 2)]
