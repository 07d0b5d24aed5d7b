"""Lays out the entries that a draft layer computes at once, and carries them to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.rows import BatchRows
from gpu_worker.execution.batch.step_table import Frame, lay_out
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.speculative.hidden_vectors.form import EntryStep


class EntryRows:
    """Owns a row of the layer's batch for each sequence that it has seen, with its block table on host and device."""

    def __init__(self, cache: KVCache, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        """Make room for `max_num_seqs` sequences of at most `max_model_len` tokens, over the layer's `cache`."""
        self._cache = cache
        self._device = device
        self._writer, self._sequences = PlanWriter(), BatchSequences()
        self._departed: list[Sequence] = []
        self._rows = BatchRows(max_num_seqs, -(-max_model_len // cache.block_size), device)

    def step(
        self, scheduled: Values[ScheduledSequence], hidden: Values[torch.Tensor], limits: Values[int] = ()
    ) -> EntryStep:
        """Return the step of these entries.

        Args:
            scheduled: The entries of each sequence, as its tokens.
            hidden: The vectors of each.
            limits: Most draft tokens of each of the first sequences; none where nothing is drafted.
        """
        upload = Upload(self._device)
        plan = self._writer.write_any(scheduled, self._departed)
        self._departed = []
        self._sequences.apply(plan)
        self._rows.follow(plan, upload)
        layout = lay_out(plan, self._sequences.of(plan.rows), Frame(self._rows.tables, self._cache.block_size))
        token_ids, positions, slots = map(upload.add, (layout.token_ids, layout.positions, layout.slots))
        staged_rows, query_starts = upload.add(layout.rows), upload.add(layout.query_starts)
        context_lens, staged_limits = upload.add(layout.context_lens), upload.add(np.array(limits, dtype=np.int64))
        upload.send()
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=slots.tensor,
            block_tables=self._rows.block_tables(staged_rows.tensor),
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
