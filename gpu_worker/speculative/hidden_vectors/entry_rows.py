"""The entries of a draft layer that are still to be computed, and how those of one step are laid out.

Entry `i` of the layer's KV cache is computed from the model's hidden vector at position `i` and from token `i + 1`,
which the model sampled from that vector. So the layer sees the sequence shifted by one token. The entries of a step
reach the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.placed_tokens import Frame
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import lay_out
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.drafts.proposer import ComputedTokens
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.speculative.hidden_vectors.layer import EntryStep


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
