"""Drafts by a layer that predicts hidden vectors, whose KV cache has the blocks of the model's own.

An *entry* is what the layer keeps of a position: keys and values made of a hidden vector of the model and of the token
that follows it, in the blocks of the sequence's own table. So prefix cache, preemption and resumption need nothing
more. Entries of a step's hidden vectors are computed when drafts are next asked for, for all sequences at once.

Some entries are wrong: those that were never computed are what the zeroed memory held, and the last entry of a shared
block depends on the next token, which differs between sequences. They make drafts worse, never answers.

A draft is the likeliest chain of tokens, and ends where another pass no longer pays.

Source: Li et al., "EAGLE" (arXiv 2401.15077), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Values

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.speculative.hidden_vectors.entry_rows import EntryRows, PendingEntries
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, EntryStep

MAX_NUM_KEPT = 8192
"""Hidden vectors. Above this limit, entries of prompts are computed at once, and the vectors of decodes are dropped."""


class HiddenVectorProposer:
    """Keeps the hidden vectors of the batch's sequences until their entries are computed."""

    wants_hidden = True

    def __init__(self, layer: DraftLayer, rows: EntryRows, *, max_num_batched_tokens: int) -> None:
        """Draft by `layer`, over the cache of `rows`, computing at most `max_num_batched_tokens` entries at once."""
        self._layer = layer
        # A pass pays if its token is accepted with a probability above the cost of the pass. At temperature 1 the
        # layer's probability is about the acceptance rate; when decoding is greedy, it underestimates that. The
        # cost of a pass lies between the best thresholds of both.
        self._least_chance = min(0.9, layer.relative_cost)
        self._rows = rows
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_kept = MAX_NUM_KEPT
        self._pending: dict[BatchSequence, PendingEntries] = {}
        self._num_kept = 0

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Keep the hidden vectors; entries are computed only where too many vectors are kept."""
        for item in computed:
            pending = self._pending.get(item.sequence)
            if pending is None:
                pending = self._pending[item.sequence] = PendingEntries(item.sequence)
            pending.add(item)
            self._num_kept += len(item.token_ids) - 1
        if self._num_kept > self._max_num_kept:
            self._make_room()

    def forget(self, sequence: BatchSequence) -> None:
        """Drop a sequence's vectors."""
        if (pending := self._pending.pop(sequence, None)) is not None:
            self._num_kept -= pending.count
            self._rows.release(pending.shifted)

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the likeliest chains of the layer's tokens."""
        drafts = [NO_DRAFT] * len(requests)
        indices = [index for index, request in enumerate(requests) if self._reaches_end(request.sequence)]
        if not indices:
            return drafts
        for index, draft in zip(indices, self._drafts([requests[index] for index in indices]), strict=True):
            drafts[index] = draft
        return drafts

    def _reaches_end(self, sequence: BatchSequence) -> bool:
        pending = self._pending.get(sequence)
        return pending is not None and pending.count > 0 and pending.end == len(sequence.token_ids) - 1

    def _drafts(self, requests: list[DraftRequest]) -> list[Draft]:
        """Compute the pending entries of these and of all other sequences, and draft behind these."""
        limits = [request.num_tokens for request in requests]
        step = self._pending_entries([request.sequence for request in requests], limits)
        chains = self._layer.draft(step, limits, math.log(self._least_chance))
        return [Draft(tuple(chain)) for chain in chains]

    def _pending_entries(self, asked: list[BatchSequence], limits: list[int]) -> EntryStep:
        """Return a step of all pending entries, those of `asked` first; if too many, all but the last run before."""
        first = set(asked)
        sequences = asked + [s for s, pending in self._pending.items() if pending.count and s not in first]
        if sum(self._pending[sequence].count for sequence in sequences) > self._max_num_batched_tokens:
            self._compute_all_but_last(sequences)
        self._num_kept = 0
        return self._taken([(sequence, self._pending[sequence].count) for sequence in sequences], limits)

    def _make_room(self) -> None:
        """Compute the entries of prompts, all but the last of each sequence, and drop the vectors of decodes."""
        prompts = [sequence for sequence, pending in self._pending.items() if pending.has_prompt]
        for pending in self._pending.values():
            if not pending.has_prompt:
                pending.clear()
        self._compute_all_but_last(prompts)
        self._num_kept = len(prompts)

    def _compute_all_but_last(self, sequences: list[BatchSequence]) -> None:
        """Compute the pending entries of each sequence but its last one, as many at once as a step may have."""
        while True:
            left, shares = self._max_num_batched_tokens, []
            for sequence in sequences:
                if (count := min(self._pending[sequence].count - 1, left)) > 0:
                    shares.append((sequence, count))
                    left -= count
            if not shares:
                return
            step = self._taken(shares)
            self._layer.forward(step)

    def _taken(self, shares: list[tuple[BatchSequence, int]], limits: Values[int] = ()) -> EntryStep:
        taken = [self._pending[sequence].take(count) for sequence, count in shares]
        return self._rows.step([item for item, _ in taken], [rows for _, rows in taken], limits)


def propose_by(layer: DraftLayer, config: RunnerConfig, runner: TorchModelRunner) -> HiddenVectorProposer:
    """Make the proposer of a layer, whose entries lie in as many blocks as the model's keys and values."""
    cache = allocate_kv_cache(runner.num_blocks, runner.block_size, layer.config, layer.dtype, layer.device)
    # Entries that were never computed must be numbers.
    for tensor in cache.layers[0].tensors:
        tensor.zero_()
    return HiddenVectorProposer(
        layer,
        EntryRows(cache, config.max_num_seqs, runner.max_model_len, layer.device),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
