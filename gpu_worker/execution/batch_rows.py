"""A row of the batch for every sequence in it, with its block table, here and on the device.

Owns `Sequence.row`, which stays the same while the sequence is in the batch, so that what the device keeps for it need
not move. One more row, the spare one, belongs to padding: its block table is never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.step_layout import Int32s, Int64s
from gpu_worker.execution.transfers import Upload


class BatchRows:
    """Hands out rows and keeps their block tables.

    Attributes:
        spare: The row of padding.
        tables: `[max_num_seqs + 1, width]`, as this side knows them.
        device_tables: The same on the device.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        """Make room for `max_num_seqs` sequences of at most `width` blocks."""
        self.spare = max_num_seqs
        self.tables: Int32s = np.zeros((max_num_seqs + 1, width), dtype=np.int32)
        self.device_tables = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._num_placed = np.zeros(max_num_seqs, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Rows, the spare one included."""
        return len(self.tables)

    def release(self, departed: Iterable[Sequence]) -> None:
        """Take the rows back of sequences that have left the batch; some never had one."""
        for sequence in departed:
            if sequence.row is not None:
                self._free.append(sequence.row)
                sequence.row = None

    def place(self, scheduled: Values[ScheduledSequence], upload: Upload) -> tuple[Int64s, list[Sequence]]:
        """Bring rows and block tables up to date with the scheduled sequences.

        A block table only grows while its sequence is in the batch, but for the blocks of drafts (`lend`).

        Returns:
            The row of each sequence, and the sequences that are new in the batch.
        """
        sequences = [item.sequence for item in scheduled]
        newcomers = [sequence for sequence in sequences if sequence.row is None]
        for sequence in newcomers:
            sequence.row = self._free.pop()
            self._num_placed[sequence.row] = 0
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        sizes = np.array([len(sequence.block_table) for sequence in sequences], dtype=np.int64)
        grown = np.flatnonzero(self._num_placed[rows] != sizes)
        if len(grown):
            self._write([sequences[place].block_table for place in grown.tolist()], rows[grown], upload)
        return rows, newcomers

    def lend(self, scheduled: Iterable[ScheduledSequence], block_size: int) -> None:
        """Expect that the blocks behind a sequence's known tokens are others next time: they were for its drafts."""
        for item in scheduled:
            if item.num_draft_tokens:
                self._num_placed[item.sequence.row] = -(-(item.start + item.num_tokens) // block_size)

    def _write(self, grown: list[list[int]], rows: Int64s, upload: Upload) -> None:
        """Add to block tables what their rows do not have yet."""
        width = self.tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for table, row, known in zip(grown, rows.tolist(), self._num_placed[rows].tolist(), strict=True):
            places += range(row * width + known, row * width + len(table))
            blocks += table[known:]
            self._num_placed[row] = len(table)
        staged_places = upload.add(np.array(places, dtype=np.int64))
        staged_blocks = upload.add(np.array(blocks, dtype=np.int32))
        self.tables.reshape(-1)[staged_places.array] = staged_blocks.array
        flat = self.device_tables.view(-1)
        upload.on_arrival(lambda: flat.index_copy_(0, staged_places.tensor, staged_blocks.tensor))
