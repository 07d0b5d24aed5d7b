"""From a step's plan to the tensors that the model takes.

The arrays of a step are assembled in a few whole-array operations. Block tables are kept from step to step, row by row,
because in decoding only the last entry of a row changes, and rarely.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.kv_cache import KVCache
from gpu_worker.layers.attention_context import AttentionContext


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model computes in one step.

    Attributes:
        token_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64.
        last_rows: For each scheduled sequence, the row of its last token.
        context: The batch as attention sees it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_rows: npt.NDArray[np.int64]
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
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int64)

    def assemble(self, scheduled: Values[ScheduledSequence]) -> StepInputs:
        """Lay the scheduled tokens of all sequences end to end."""
        count = len(scheduled)
        self._place_tables(scheduled)
        starts = np.array([item.start for item in scheduled], dtype=np.int64)
        lengths = np.array([item.num_tokens for item in scheduled], dtype=np.int64)
        max_query_len = int(lengths.max())
        if max_query_len == 1:
            token_ids = [item.sequence.token_ids[item.start] for item in scheduled]
            ends, rows, positions = self._counting[1 : count + 1], self._counting[:count], starts
        else:
            token_ids = []
            for item in scheduled:
                token_ids += item.sequence.token_ids[item.start : item.start + item.num_tokens]
            ends = lengths.cumsum()
            rows = np.repeat(self._counting[:count], lengths)
            positions = np.arange(len(token_ids)) + np.repeat(starts - ends + lengths, lengths)
        block_size = self._cache.block_size
        blocks, offsets = np.divmod(positions, block_size)
        context_lens = starts + lengths
        query_starts = np.empty(count + 1, dtype=np.int32)
        query_starts[0] = 0
        query_starts[1:] = ends
        context = AttentionContext(
            key_caches=self._cache.keys,
            value_caches=self._cache.values,
            slot_mapping=self._tensor(self._tables[rows, blocks] * np.int64(block_size) + offsets),
            block_tables=self._table_tensor[:count].to(self._device),
            query_starts=self._tensor(query_starts),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            max_query_len=max_query_len,
            max_context_len=int(context_lens.max()),
        )
        return StepInputs(torch.tensor(token_ids, device=self._device), self._tensor(positions), ends - 1, context)

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
