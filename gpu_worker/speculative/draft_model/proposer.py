"""Drafts by a smaller model with the same vocabulary, the draft model, which keeps KV blocks of its own.

For each sequence of the batch the draft model has one of its own: the same tokens, then the draft that it made last.
Before the next draft, rejected draft tokens are dropped, and its `num_computed_tokens` catches up with the tokens that
are known now, as in the engine. Draft tokens are sampled with the request's own parameters and uniform numbers: where
both models' distributions agree, so do the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import msgspec

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.draft import Draft
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling


class _Shadow:
    """A sequence as the draft model has it. The first `num_known` of its tokens are the original's own."""

    __slots__ = ("num_known", "sequence")

    def __init__(self, original: BatchSequence) -> None:
        self.num_known = 0
        sampling = plain_sampling(original.sampling)
        self.sequence = Sequence(original.id, [], original.num_prompt_tokens, sampling, 0)

    def follow(self, token_ids: list[int]) -> list[int]:
        """Take over the original's tokens, and return those that are new here; rejected draft tokens are dropped."""
        mine = self.sequence.token_ids
        same, end = self.num_known, min(len(mine), len(token_ids))
        while same < end and mine[same] == token_ids[same]:
            same += 1
        new = token_ids[same:]
        if same < len(mine):
            PlanWriter.rewind(self.sequence, same)
        mine[same:] = new
        self.num_known = len(mine)
        # At least the last token is computed again, since the draft is sampled from its logits.
        self.sequence.num_computed_tokens = min(self.sequence.num_computed_tokens, same, len(mine) - 1)
        return new


@dataclass(slots=True, eq=False)
class _Drafting:
    """A draft in the making: at most `num_wanted` tokens, those sampled so far in `token_ids`."""

    sequence: Sequence
    num_wanted: int
    token_ids: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Owns the draft model's sequences and the blocks of its cache.

    Each call computes one step of prompts at most before it drafts, so that a long prompt delays no other. A sequence
    gets no draft until the draft model has caught up with it, nor where no block is free.
    """

    wants_hidden = False

    def __init__(
        self, runner: TorchModelRunner, *, vocab_size: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pool = BlockPool(runner.num_blocks)
        # None for a sequence with tokens that the draft model does not know.
        self._shadows: dict[BatchSequence, _Shadow | None] = {}
        self._writer = PlanWriter()
        self._departed: list[Sequence] = []

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the draft model's tokens."""
        drafts = [self._begin(request) for request in requests]
        unfinished = [draft for draft in drafts if draft is not None]
        while unfinished:
            unfinished = [draft for draft in self._step(unfinished) if len(draft.token_ids) < draft.num_wanted]
        return [Draft() if draft is None else Draft(tuple(draft.token_ids)) for draft in drafts]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Ignore it."""

    def forget(self, sequence: BatchSequence) -> None:
        """Drop the draft model's sequence and take its blocks back."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None:
            self._drop(shadow)

    def _begin(self, request: DraftRequest) -> _Drafting | None:
        """Bring the draft model's sequence up to date, with blocks for the draft; None when it cannot have one."""
        original = request.sequence
        if original not in self._shadows:
            self._shadows[original] = _Shadow(original)
        shadow = self._shadows[original]
        num_tokens = len(original.token_ids) + request.num_tokens
        if shadow is None or num_tokens > self._max_model_len:
            return None
        if max(shadow.follow(original.token_ids), default=0) >= self._vocab_size:
            self._drop(shadow)
            self._shadows[original] = None
            return None
        table = shadow.sequence.block_table
        missing = -(-num_tokens // self._runner.block_size) - len(table)
        if missing > self._pool.num_available:
            return None
        table += self._pool.allocate(max(0, missing))
        return _Drafting(shadow.sequence, request.num_tokens)

    def _drop(self, shadow: _Shadow) -> None:
        self._pool.release(shadow.sequence.block_table)
        self._departed.append(shadow.sequence)

    def _step(self, drafts: list[_Drafting]) -> list[_Drafting]:
        """Compute what sequences lack, in order, as far as one step goes; return those that got a token."""
        left = self._max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        for draft in drafts:
            sequence = draft.sequence
            num_tokens = min(sequence.num_uncomputed_tokens, left)
            if num_tokens == 0:
                break
            left -= num_tokens
            samples = num_tokens == sequence.num_uncomputed_tokens
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, samples))
        plan = self._writer.write_any(scheduled, self._departed)
        self._departed = []
        result = self._runner.submit(plan).result()
        sampling = []
        for draft, item, sampled in zip(drafts[: len(scheduled)], scheduled, result.sampled, strict=True):
            item.sequence.num_computed_tokens += item.num_tokens
            if item.samples:
                item.sequence.token_ids += sampled.token_ids
                draft.token_ids += sampled.token_ids
                sampling.append(draft)
        return sampling


def plain_sampling(sampling: Sampling) -> Sampling:
    """Return the parameters without log probabilities, penalties and grammar, whose state cannot be taken back."""
    return msgspec.structs.replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        prompt_logprobs=None,
        grammar=None,
    )
