"""Drafts by a smaller model with the same vocabulary, which keeps KV blocks of its own.

Each sequence has a double here: its tokens, then the draft of the last time. What was not accepted is taken back, and
the double's `num_computed_tokens` catches up with the rest by the rule that all sequences follow. Draft tokens are
sampled as the request's own, with the same uniform numbers: where the models' distributions agree, so do the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import Protocol

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.draft import Draft
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.speculative.plain_sampling import plain_sampling


class DraftRunner(Protocol):
    """Executes plans of doubles on the smaller model."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of its cache."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute the plan's tokens and sample where it says so."""
        ...

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that no plan will name any more."""
        ...


class _Double:
    """The smaller model's view of a sequence. The first `num_known` of its tokens are the sequence's own."""

    __slots__ = ("num_known", "sequence")

    def __init__(self, original: Sequence) -> None:
        self.num_known = 0
        sampling = plain_sampling(original.sampling)
        self.sequence = Sequence(original.id, [], original.num_prompt_tokens, sampling, 0)

    def follow(self, token_ids: list[int]) -> list[int]:
        """Take over the sequence's tokens, and return those that are new here; KV of rejected draft tokens is void."""
        mine = self.sequence.token_ids
        same, end = self.num_known, min(len(mine), len(token_ids))
        while same < end and mine[same] == token_ids[same]:
            same += 1
        new = token_ids[same:]
        mine[same:] = new
        self.num_known = len(mine)
        # The last token is computed in any case, since a draft needs its logits.
        self.sequence.num_computed_tokens = min(self.sequence.num_computed_tokens, same, len(mine) - 1)
        return new


class DraftModelProposer:
    """Owns the doubles of the batch's sequences and the blocks of the smaller model's cache.

    Prompts are computed in chunks, some in every call, so that a long one delays nobody; until its double has caught
    up, there is no draft for a sequence, nor where no block is free.
    """

    wants_hidden = False

    def __init__(
        self, runner: DraftRunner, *, vocab_size: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        """Draft with `runner`.

        Args:
            runner: Runs the smaller model.
            vocab_size: Tokens that the smaller model knows; a sequence with others gets no draft.
            max_model_len: Tokens of a sequence that it can take.
            max_num_batched_tokens: Tokens to compute at once.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pool = BlockPool(runner.num_blocks)
        self._doubles: dict[Sequence, _Double | None] = {}

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the smaller model's tokens."""
        doubles = [self._double(request) for request in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        unfinished = self._run([index for index, double in enumerate(doubles) if double], doubles, drafts)
        while unfinished := [index for index in unfinished if len(drafts[index]) < requests[index].num_tokens]:
            unfinished = self._run(unfinished, doubles, drafts)
        return [Draft(tuple(token_ids)) for token_ids in drafts]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's double and take its blocks back."""
        double = self._doubles.pop(sequence, None)
        if double is not None:
            self._drop(double)

    def _double(self, request: DraftRequest) -> Sequence | None:
        """Return the double, up to date and with blocks for the draft; None when it cannot have one."""
        original = request.sequence
        if original not in self._doubles:
            self._doubles[original] = _Double(original)
        double = self._doubles[original]
        num_tokens = len(original.token_ids) + request.num_tokens
        if double is None or num_tokens > self._max_model_len:
            return None
        if max(double.follow(original.token_ids), default=0) >= self._vocab_size:
            self._drop(double)
            self._doubles[original] = None
            return None
        table = double.sequence.block_table
        missing = -(-num_tokens // self._runner.block_size) - len(table)
        if missing > self._pool.num_available:
            return None
        table += self._pool.allocate(max(0, missing))
        return double.sequence

    def _drop(self, double: _Double) -> None:
        self._pool.release(double.sequence.block_table)
        self._runner.release([double.sequence])

    def _run(self, indices: list[int], doubles: list[Sequence | None], drafts: list[list[int]]) -> list[int]:
        """Compute what these doubles lack, as far as a step goes; add a token where that is all, and return where."""
        left = self._max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        scheduled_indices: list[int] = []
        for index in indices:
            double = doubles[index]
            assert double is not None
            num_tokens = min(double.num_uncomputed_tokens, left)
            if num_tokens == 0:
                break
            left -= num_tokens
            samples = num_tokens == double.num_uncomputed_tokens
            scheduled.append(ScheduledSequence(double, double.num_computed_tokens, num_tokens, samples))
            scheduled_indices.append(index)
        if not scheduled:
            return []
        plan = StepPlan(0, scheduled, self._max_num_batched_tokens - left)
        sampling = []
        for index, item, sampled in zip(
            scheduled_indices, scheduled, self._runner.submit(plan).result().sampled, strict=True
        ):
            item.sequence.num_computed_tokens += item.num_tokens
            if item.samples:
                item.sequence.token_ids += sampled.token_ids
                drafts[index] += sampled.token_ids
                sampling.append(index)
        return sampling
