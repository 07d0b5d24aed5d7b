"""Drafts by a layer that predicts hidden vectors, whose KV cache has the blocks of the model's own.

An *entry* is what the layer keeps of a position: keys and values made of a hidden vector of the model and of the token
that follows it, in the blocks of the sequence's own table. So prefix cache, preemption and resumption need nothing
more. Entries of a step's hidden vectors are computed when drafts are next asked for, for all sequences at once.

Some entries are wrong: those that were never computed are what the zeroed memory held, and the last entry of a shared
block depends on the next token, which differs between sequences. They make drafts worse, never answers.

A draft is the likeliest chain of tokens, and ends where another pass no longer pays.

Source: Li et al., "EAGLE" (arXiv 2401.15077), section 4.1.

The entries of a draft layer that are still to be computed, and how those of one step are laid out.

Entry `i` of the layer's KV cache is computed from the model's hidden vector at position `i` and from token `i + 1`,
which the model sampled from that vector. So the layer sees the sequence shifted by one token. The entries of a step
reach the device in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences
from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.placed_tokens import Frame
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import lay_out
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.execution.memory.kv_cache import KVCache, allocate_kv_cache
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, EntryStep


class PendingEntries:
    """Owns the vectors of `count` positions from `start`, and `shifted`, the sequence without its first token."""

    __slots__ = ("_chunks", "_original", "count", "shifted", "start")

    def __init__(self, original: BatchSequence) -> None:
        self.shifted = Sequence(original.id, [], original.num_prompt_tokens - 1, original.sampling, 0)
        self._original = original
        self.clear()

    @property
    def end(self) -> int:
        """Position behind the last vector."""
        return self.start + self.count

    @property
    def has_prompt(self) -> bool:
        """Return whether the first vector belongs to the prompt."""
        return self.count > 0 and self.start < self.shifted.num_prompt_tokens

    def clear(self) -> None:
        """Drop all vectors."""
        self._chunks: list[torch.Tensor] = []
        self.start = self.count = 0

    def add(self, computed: ComputedTokens) -> None:
        """Keep the vectors that a step computed. Where they do not continue those kept so far, those are dropped."""
        start, new = computed.start, computed.token_ids[1:]
        if not new:
            return
        if start != self.start + self.count:
            self.clear()
            self.start = start
        self._chunks.append(computed.hidden)
        self.count += len(new)
        token_ids = self.shifted.token_ids
        if len(token_ids) != start:
            # Drafts were rejected, or tokens came from the prefix cache: take the tokens up to here from the original.
            known = min(len(token_ids), start)
            PlanWriter.rewind(self.shifted, known)
            token_ids[known:] = self._original.token_ids[known + 1 : start + 1]
        token_ids += new

    def take(self, count: int) -> tuple[ScheduledSequence, torch.Tensor]:
        """Remove the first `count` vectors; return them with the share of a step in which the layer computes them."""
        if self.shifted.block_table is not self._original.block_table:
            self.shifted.block_table, self.shifted.num_told_blocks = self._original.block_table, 0
        rows = self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks)
        item = ScheduledSequence(self.shifted, self.start, count, False)
        # A copy, since a view of few rows would keep all of them in memory.
        self._chunks = [rows[count:].clone()] if count < self.count else []
        self.start += count
        self.count -= count
        return item, rows[:count]


class EntryRows:
    """Owns a row of the layer's batch for each sequence that it has seen, with its block table on host and device."""

    def __init__(self, cache: KVCache, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._writer, self._sequences = PlanWriter(), BatchSequences()
        self._departed: list[Sequence] = []
        self._rows = BatchRows(max_num_seqs, -(-max_model_len // cache.block_size), device)

    def step(
        self, scheduled: Values[ScheduledSequence], hidden: Values[torch.Tensor], limits: Values[int] = ()
    ) -> EntryStep:
        """Return the step of these entries; `limits` are most draft tokens of each of the first sequences."""
        upload = Upload(self._device)
        plan = self._writer.write_any(scheduled, self._departed)
        self._departed = []
        self._sequences.apply(plan)
        self._rows.follow(plan, upload)
        layout = lay_out(plan, self._sequences.of(plan.rows), Frame(self._rows.whole.host, self._cache.block_size))
        token_ids, positions, slots = map(upload.add, (layout.token_ids, layout.positions, layout.slots))
        staged_rows, query_starts = upload.add(layout.rows), upload.add(layout.query_starts)
        context_lens, staged_limits = upload.add(layout.context_lens), upload.add(np.array(limits, dtype=np.int64))
        upload.send()
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=slots.tensor,
            block_tables=self._rows.whole.of(staged_rows.tensor),
            query_starts=query_starts.tensor,
            context_lens=context_lens.tensor,
            max_query_len=layout.max_query_len,
            max_context_len=layout.max_context_len,
        )
        together = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
        return EntryStep(
            token_ids.tensor, together, positions.tensor, context, staged_limits.tensor if limits else None
        )

    def release(self, sequence: Sequence) -> None:
        """Take the row of a sequence back that has left the batch, if it has one."""
        self._departed.append(sequence)


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
