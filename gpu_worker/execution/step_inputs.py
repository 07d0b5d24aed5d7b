"""From a step's plan to the tensors that the model takes.

Block tables are kept from step to step, row by row, because in decoding only the last entry of a row changes, and
rarely. Row `i` is the i-th sequence of the step's, whichever that is, so that the rows of a step lie together.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.batch.layout import StepLayout, lay_out
from gpu_worker.execution.memory.kv_cache import KVCache
from gpu_worker.layers.attention_context import AttentionContext


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model computes in one step.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        layout: Where the tokens of each sequence are.
        context: The batch as attention sees it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layout: StepLayout
    context: AttentionContext


class StepAssembler:
    """Owns the block tables of the running batch."""

    def __init__(self, cache: KVCache, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        """Assemble steps of at most `max_num_seqs` sequences of at most `max_model_len` tokens."""
        self._cache = cache
        self._device = device
        width = -(-max_model_len // cache.block_size)
        self._table_tensor = torch.zeros(max_num_seqs, width, dtype=torch.int32)
        self._tables: npt.NDArray[np.int32] = self._table_tensor.numpy()
        self._placed: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._num_placed = [0] * max_num_seqs
        self._counting = np.arange(max_num_seqs, dtype=np.int64)

    def assemble(self, scheduled: Values[ScheduledSequence], drafts: Values[Draft] | None = None) -> StepInputs:
        """Lay the scheduled tokens of all sequences end to end, each with its drafts behind it."""
        count = len(scheduled)
        self._place_tables(scheduled)
        layout = lay_out(scheduled, self._counting[:count], self._tables, self._cache.block_size, drafts)
        context = AttentionContext(
            caches=self._cache.layers,
            slot_mapping=self._tensor(layout.slots),
            block_tables=self._table_tensor[:count].to(self._device),
            query_starts=self._tensor(layout.query_starts),
            context_lens=self._tensor(layout.context_lens),
            max_query_len=layout.max_query_len,
            max_context_len=int(layout.context_lens.max()),
            tree_masks=None if layout.tree_masks is None else self._tensor(layout.tree_masks),
        )
        return StepInputs(self._tensor(layout.token_ids), self._tensor(layout.positions), layout, context)

    def _place_tables(self, scheduled: Values[ScheduledSequence]) -> None:
        """Bring row `i` of the block tables up to date with the i-th sequence.

        A block table only grows; a sequence that got other blocks has a new list.
        """
        placed, num_placed, tables = self._placed, self._num_placed, self._tables
        for row, item in enumerate(scheduled):
            table = item.sequence.block_table
            known, size = num_placed[row], len(table)
            if placed[row] is not table:
                placed[row], known = table, 0
            if known != size:
                tables[row, known:size] = table[known:]
                num_placed[row] = size

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
