"""The smaller model's bookkeeping, on a runner that notices every wrong read of its blocks."""

from __future__ import annotations

import random

import msgspec
import pytest

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import CompletedStep
from gpu_worker.execution.drafts.proposer import DraftRequest
from gpu_worker.speculative.draft_model.proposer import DraftModelProposer
from shared.sampling import Sampling
from tests.gpu_worker.core.paged_oracle import OracleRunner, reference_tokens

VOCAB_SIZE = 50
BLOCK = 4


class DraftOracle:
    """The oracle as a runner that computes at once; counts the tokens of its steps."""

    block_size = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.oracle = OracleRunner(BLOCK, VOCAB_SIZE, max_num_seqs=10_000, salt=b"")
        self.num_steps = 0
        self.most_tokens = 0

    def submit(self, plan: StepPlan) -> CompletedStep:
        assert all(plan.lengths), "a sequence takes part in a step with nothing to compute"
        self.num_steps += 1
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        numbered = msgspec.structs.replace(plan, step=self.num_steps)
        return CompletedStep(self.oracle.submit(numbered).result())


def make_proposer(
    num_blocks: int = 1000, max_num_batched_tokens: int = 64, max_model_len: int = 500, vocab_size: int = VOCAB_SIZE
) -> tuple[DraftModelProposer, DraftOracle]:
    runner = DraftOracle(num_blocks)
    proposer = DraftModelProposer(
        runner, vocab_size=vocab_size, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    return proposer, runner


def make_sequence(length: int, first: int = 1) -> Sequence:
    return Sequence("s", [(first + i) % VOCAB_SIZE for i in range(length)], length, Sampling(), 1000)


def drafts_of(proposer: DraftModelProposer, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
    drafts = proposer.propose(requests)
    return [draft.token_ids for draft in drafts]


def right(sequence: Sequence, count: int) -> tuple[int, ...]:
    return tuple(reference_tokens(b"", sequence.token_ids, count, frozenset(), VOCAB_SIZE)[0])


def test_drafts_are_the_smaller_models_tokens_whatever_became_of_those_before() -> None:
    generator = random.Random(7)
    proposer, _ = make_proposer(max_num_batched_tokens=10_000)
    sequences = [make_sequence(length, first) for first, length in enumerate([1, 5, 9, 30])]
    for _ in range(60):
        asked = generator.sample(sequences, generator.randint(1, 4))
        requests = [DraftRequest(sequence, generator.randint(1, 6)) for sequence in asked]
        drafts = drafts_of(proposer, requests)
        for request, draft in zip(requests, drafts, strict=True):
            sequence = request.sequence
            assert draft == right(sequence, request.num_tokens)
            num_accepted = generator.randint(0, len(draft))
            sequence.token_ids += [*draft[:num_accepted], generator.randrange(VOCAB_SIZE)]
        if generator.random() < 0.1:
            proposer.forget(generator.choice(sequences))


def test_accepted_tokens_are_not_computed_again() -> None:
    proposer, runner = make_proposer()
    sequence = make_sequence(20)
    [draft] = drafts_of(proposer, [DraftRequest(sequence, 4)])
    sequence.token_ids += [*draft, 3]
    before = runner.oracle.num_computed_tokens
    drafts_of(proposer, [DraftRequest(sequence, 4)])
    assert runner.oracle.num_computed_tokens - before == 2 + 3


def test_long_prompt_is_caught_up_with_in_chunks_and_delays_no_other() -> None:
    proposer, runner = make_proposer(max_num_batched_tokens=16)
    short, long = make_sequence(3), make_sequence(40, first=9)
    requests = [DraftRequest(short, 2), DraftRequest(long, 2)]
    for expected in ((), (), right(long, 2)):
        assert drafts_of(proposer, requests) == [right(short, 2), expected]
    assert runner.most_tokens <= 16


def test_sequence_for_which_a_step_has_no_room_left_waits_for_the_next() -> None:
    proposer, _ = make_proposer(max_num_batched_tokens=16)
    first, second = make_sequence(16), make_sequence(5, first=9)
    requests = [DraftRequest(first, 2), DraftRequest(second, 2)]
    assert drafts_of(proposer, requests) == [right(first, 2), ()]
    assert drafts_of(proposer, requests) == [right(first, 2), right(second, 2)]


def test_sequences_without_blocks_get_no_draft_until_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, runner = make_proposer(num_blocks=4)
    plans: list[StepPlan] = []
    submit = runner.submit
    monkeypatch.setattr(runner, "submit", lambda plan: (plans.append(plan), submit(plan))[1])
    first, second = make_sequence(10), make_sequence(10, first=5)
    requests = [DraftRequest(first, 2), DraftRequest(second, 2)]
    assert drafts_of(proposer, requests) == [right(first, 2), ()]
    proposer.forget(first)
    proposer.forget(first)
    assert drafts_of(proposer, requests[1:]) == [right(second, 2)]
    # The runner forgets it, too.
    assert sum(len(plan.departed) for plan in plans) == 1


def test_sequence_beyond_the_smaller_models_length_gets_no_draft() -> None:
    proposer, _ = make_proposer(max_model_len=12)
    sequence = make_sequence(10)
    assert drafts_of(proposer, [DraftRequest(sequence, 2)]) == [right(sequence, 2)]
    assert drafts_of(proposer, [DraftRequest(sequence, 3)]) == [()]


def test_sequence_with_tokens_unknown_to_the_smaller_model_gets_no_draft() -> None:
    proposer, _ = make_proposer(vocab_size=40)
    sequence = make_sequence(3)
    assert len(drafts_of(proposer, [DraftRequest(sequence, 2)])[0]) == 2
    sequence.token_ids.append(45)
    assert drafts_of(proposer, [DraftRequest(sequence, 2)]) == [()]
    sequence.token_ids.append(1)
    assert drafts_of(proposer, [DraftRequest(sequence, 2)]) == [()]
    proposer.forget(sequence)


def test_nothing_is_kept_of_sequences_that_the_smaller_model_cannot_take() -> None:
    proposer, _ = make_proposer(max_model_len=12, vocab_size=40)
    for _ in range(20):
        long, unknown = make_sequence(30), make_sequence(3)
        unknown.token_ids.append(45)
        assert drafts_of(proposer, [DraftRequest(long, 2), DraftRequest(unknown, 2)]) == [(), ()]
        proposer.forget(long)
        proposer.forget(unknown)
    assert not proposer._shadows
