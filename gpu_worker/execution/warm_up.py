"""Steps that make everything happen which happens only once: kernels compiled, libraries loaded, memory taken.

On a CPU, where nothing is compiled for a shape, two steps do.

A kernel that is compiled while requests wait delays all of them by seconds. Its variants depend on the number of
sequences, on the largest number of query tokens of one, on the requested sampling, and on whether drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import MAX_DRAFT_TOKENS, Draft
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StateWork, StepPlan
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.graph_shapes import powers_of_two
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.layers.attention_context import StepSizes
from shared.sampling import Sampling

# Up to this, products of few rows may be divided among programs in a way that depends on the exact number.
_MAX_DISTINCT_ROWS = 64
# Above this all chunks run in the same kernels: no model has tiles of more query tokens.
_MAX_DISTINCT_QUERY_LEN = 128
_FIRST_CHUNK = 64
_GREEDY = Sampling(temperature=0.0)
_SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01),
    # Masks of grammars are applied by the same kernel as those of allowed tokens.
    Sampling(temperature=1.0, presence_penalty=0.1, allowed_token_ids=(0,)),
    Sampling(
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        logprobs=20,
        logprob_token_ids=(0,),
        prompt_logprobs=20,
    ),
)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step; `max_model_len` tokens have blocks. In the spare slot for states there is no sequence's.

    `expands` tells which steps make keys and values of latent vectors; None where none does. `part` is the part of the
    blocks that the sequences belong to: each rank computes with its own.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    max_draft_tokens: int = 0
    num_window_blocks: tuple[int, ...] = ()
    spare_state_slot: int | None = None
    expands: Callable[[StepSizes], bool] | None = None
    part: int = 0


class WarmUpProposer:
    """Proposes as many draft tokens as are asked for."""

    wants_hidden = False

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the same token again and again."""
        return [Draft((0,) * request.num_tokens) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: BatchSequence) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Tokens of each sequence of a step, and drafts that each verifies."""

    lengths: list[int]
    sampling: Sampling
    drafts: list[int]
    save_to: int | None = None
    """The slot that the first sequence's state is copied to."""
    num_cached: int = 0
    """Tokens of each sequence before these."""
    last_cached: int = 0
    """The same of the last sequence alone."""


def warm_up_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Yield steps to execute, the largest first."""
    return _plans((*_plain_shapes(limits), *_draft_shapes(limits)), limits)


def first_plans(limits: StepLimits) -> Iterator[StepPlan]:
    """Do the same with a chunk of a prompt and a decode alone."""
    length = max(1, min(limits.max_num_batched_tokens, limits.max_model_len - 1, _FIRST_CHUNK))
    return _plans([_Shape([length], _SAMPLINGS[1], [0]), _Shape([1], _GREEDY, [0])], limits)


class WarmedRunner(Protocol):
    """A runner with a proposer of drafts."""

    @property
    def step_limits(self) -> StepLimits:
        """What bounds its steps."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Launch a step."""

    def clear(self) -> None:
        """Forget all sequences."""


def warm_up_proposer(runner: WarmedRunner) -> None:
    """Let the runner's own proposer draft behind prompts and for batches of all kinds, before the first step."""
    limits = runner.step_limits
    room = min(limits.max_model_len - 2, limits.max_num_batched_tokens - 1)
    num_drafts = min(limits.max_draft_tokens, MAX_DRAFT_TOKENS, room)
    if num_drafts < 1:
        return
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens // (1 + num_drafts))
    batches = [[1] * count for count in range(1, min(most, _MAX_DISTINCT_ROWS) + 1)]
    batches += [[query_len] + [1] * (count - 1) for count, query_len in _mixtures(limits) if count <= most]
    for lengths in batches:
        # A token and its drafts follow the longest prompt too.
        lengths[0] = max(1, min(lengths[0], limits.max_model_len - 1 - num_drafts))
        writer = PlanWriter()
        sequences = [_sequence(length, 1 + num_drafts, _GREEDY, limits) for length in lengths]
        scheduled = [ScheduledSequence(sequence, 0, len(sequence.token_ids), True) for sequence in sequences]
        sampled = runner.submit(writer.write_any(scheduled)).result().sampled
        for sequence, tokens in zip(sequences, sampled, strict=True):
            sequence.token_ids += tokens.token_ids
        scheduled = [
            ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True, num_drafts) for sequence in sequences
        ]
        runner.submit(writer.write_any(scheduled, step=1)).result()
        runner.clear()


def _plans(shapes: Iterable[_Shape], limits: StepLimits) -> Iterator[StepPlan]:
    writer = PlanWriter()
    departed: list[Sequence] = []
    for shape in shapes:
        before = [shape.num_cached] * len(shape.lengths)
        before[-1] += shape.last_cached
        scheduled = [
            ScheduledSequence(
                _sequence(cached + length, num_drafts, shape.sampling, limits), cached, length, True, num_drafts
            )
            for cached, length, num_drafts in zip(before, shape.lengths, shape.drafts, strict=True)
        ]
        plan = writer.write_any(scheduled, departed)
        departed = [item.sequence for item in scheduled]
        if shape.save_to is not None:
            plan = structs.replace(plan, states=[(0, StateWork(is_first=False, saves=((1, shape.save_to),)))])
        yield plan


def _plain_shapes(limits: StepLimits) -> Iterator[_Shape]:
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    largest = _spread(limits.max_num_batched_tokens, most, limits.max_model_len)
    for sampling in reversed(_SAMPLINGS):
        yield _Shape(largest, sampling, [0] * most)
    # Beside a sequence with the longest context no keys and values are made: the same kernels with and without.
    longest = 0 if limits.expands is None else limits.max_model_len - 1
    if longest and most > 1:
        last = min(largest[-1], longest)
        yield _Shape([*largest[:-1], last], _GREEDY, [0] * most, last_cached=limits.max_model_len - last)
    for sampling in _SAMPLINGS:
        yield _Shape([1], sampling, [0])
    for count in range(1, min(most, _MAX_DISTINCT_ROWS) + 1):
        yield _Shape([1] * count, _GREEDY, [0] * count)
    for count, query_len in _mixtures(limits):
        yield _Shape([query_len] + [1] * (count - 1), _GREEDY, [0] * count, last_cached=longest if count > 1 else 0)
    yield from _expanded_shapes(limits)
    if limits.spare_state_slot is not None:
        for query_len in (1, min(_FIRST_CHUNK, limits.max_num_batched_tokens, limits.max_model_len - 1)):
            yield _Shape([query_len], _GREEDY, [0], limits.spare_state_slot)


def _expanded_shapes(limits: StepLimits) -> Iterator[_Shape]:
    """Yield the shortest and the longest chunk behind a long context whose keys and values are made, and whole prompts.

    The shortest one has the fewest programs, which divide the context among more. The longest takes the most memory,
    or the prompts do, where a step has room for more tokens than a sequence.
    """
    expands = limits.expands
    if expands is None:
        return
    longest, room = limits.max_model_len, limits.max_num_batched_tokens
    most = min(longest, room)

    def is_expanded(query_lens: list[int], context_lens: list[int]) -> bool:
        return expands(StepSizes.of(query_lens, context_lens, limits.block_size, longest))

    if not is_expanded([most], [longest]):
        return
    shortest = next(length for length in range(1, most + 1) if is_expanded([length], [longest]))
    for length in (shortest, most):
        yield _Shape([length], _GREEDY, [0], num_cached=longest - length)
    prompts = _spread(room, min(limits.max_num_seqs, -(-room // longest)), longest)
    if len(prompts) > 1 and is_expanded(prompts, prompts):
        yield _Shape(prompts, _GREEDY, [0] * len(prompts))


def _draft_shapes(limits: StepLimits) -> Iterator[_Shape]:
    room = min(limits.max_model_len, limits.max_num_batched_tokens) - 1
    most_drafts = min(limits.max_draft_tokens, MAX_DRAFT_TOKENS, room)
    if most_drafts < 1:
        return
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens // (1 + most_drafts))
    for sampling in reversed(_SAMPLINGS):
        yield _Shape([1] * most, sampling, [most_drafts] * most)
    for sampling in _SAMPLINGS:
        yield _Shape([1], sampling, [1])
    for num_rows in range(2, min(most * (1 + most_drafts), _MAX_DISTINCT_ROWS) + 1):
        # As many drafts to the first ones as they may have.
        count = -(-num_rows // (1 + most_drafts))
        rows = _spread(num_rows, count, 1 + most_drafts)
        yield _Shape([1] * count, _GREEDY, [num_tokens - 1 for num_tokens in rows])
    for query_len in powers_of_two(1 + most_drafts)[1:]:
        yield _Shape([1], _GREEDY, [query_len - 1])
    for count, query_len in _mixtures(limits):
        # A chunk of a prompt, decodes, and a draft: what hides tokens from one another is there for all.
        if count > 1 and query_len + count <= limits.max_num_batched_tokens:
            yield _Shape([1] * (count - 1) + [query_len], _GREEDY, [1] + [0] * (count - 1))


def _mixtures(limits: StepLimits) -> Iterator[tuple[int, int]]:
    """Yield numbers of sequences, and of query tokens of one of them, that attention may be compiled for."""
    max_query_len = min(limits.max_model_len, limits.max_num_batched_tokens)
    for count in powers_of_two(limits.max_num_seqs):
        for query_len in powers_of_two(max_query_len):
            is_distinct = query_len <= _MAX_DISTINCT_QUERY_LEN or count == 1
            if is_distinct and query_len + count - 1 <= limits.max_num_batched_tokens:
                yield count, query_len


def _spread(num_tokens: int, count: int, max_len: int) -> list[int]:
    """Share out tokens to `count` sequences: as many to the first ones as they may have, one at least to each."""
    lengths, left = [], num_tokens
    for after in reversed(range(count)):
        lengths.append(min(max_len, left - after))
        left -= lengths[-1]
    return lengths


def _sequence(length: int, num_drafts: int, sampling: Sampling, limits: StepLimits) -> Sequence:
    """All of them use the same blocks: what they compute is of no interest.

    Those of a long context come again and again, as of no more are the tokens written.
    """
    num_written = -(-min(limits.max_model_len, limits.max_num_batched_tokens) // limits.block_size)
    blocks = [block % num_written for block in range(-(-(length + num_drafts) // limits.block_size))]
    windows = tuple(
        WindowTable([block % count for block in blocks], 0, len(blocks), 0) for count in limits.num_window_blocks
    )
    sequence = Sequence("warm-up", [0] * length, length, sampling, 1, block_table=blocks, window_tables=windows)
    sequence.part = limits.part
    return sequence
