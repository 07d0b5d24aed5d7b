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
from gpu_worker.execution.batch.layout import Int32s, Int64s
from gpu_worker.execution.batch.transfers import Upload


class BatchRows:
    """Hands out rows and keeps their block tables.

    Attributes:
        spare: The row of padding.
        tables: `[max_num_seqs + 1, width]`, as this side knows them.
        device_tables: The same on the device; on a CPU the same memory.
        prompt_lens: `[max_num_seqs + 1]`, prompt tokens of each row's sequence.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        """Make room for `max_num_seqs` sequences of at most `width` blocks."""
        self.spare = max_num_seqs
        self.tables: Int32s = np.zeros((max_num_seqs + 1, width), dtype=np.int32)
        self._is_shared = device.type == "cpu"
        self.device_tables = torch.from_numpy(self.tables)
        if not self._is_shared:
            self.device_tables = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        self.prompt_lens: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._placed: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._num_placed = [0] * max_num_seqs

    @property
    def num_rows(self) -> int:
        """Rows, the spare one included."""
        return len(self.tables)

    def block_tables(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block tables of these rows, on the device.

        Shapes:
            rows: `[num_seqs]` int64, on the device
            result: `[num_seqs, width]` int32, contiguous
        """
        if self._is_shared:
            # A third of what torch takes.
            return torch.from_numpy(self.tables[rows.numpy()])
        return self.device_tables.index_select(0, rows)

    def release(self, departed: Iterable[Sequence]) -> None:
        """Take the rows back of sequences that have left the batch; some never had one."""
        for sequence in departed:
            if sequence.row is not None:
                self._free.append(sequence.row)
                # The next one with this row may have the same table, which then has to be written again.
                self._placed[sequence.row] = []
                self._num_placed[sequence.row] = 0
                sequence.row = None

    def place(self, scheduled: Values[ScheduledSequence], upload: Upload) -> tuple[Int64s, list[Sequence]]:
        """Bring rows and block tables up to date with the scheduled sequences.

        A block table only grows; a sequence that got other blocks has a new list.

        Returns:
            The row of each sequence, and the sequences that are new in the batch.
        """
        sequences = [item.sequence for item in scheduled]
        newcomers = [sequence for sequence in sequences if sequence.row is None]
        for sequence in newcomers:
            sequence.row = row = self._free.pop()
            self.prompt_lens[row] = sequence.num_prompt_tokens
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        placed, num_placed = self._placed, self._num_placed
        changed = [
            (row, sequence.block_table)
            for row, sequence in zip(rows, sequences, strict=True)
            if placed[row] is not sequence.block_table or num_placed[row] != len(sequence.block_table)
        ]
        if changed:
            self._write(changed, upload)
        return np.array(rows, dtype=np.int64), newcomers

    def _write(self, changed: list[tuple[int, list[int]]], upload: Upload) -> None:
        """Add to block tables what their rows do not have yet."""
        width = self.tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for row, table in changed:
            known = self._num_placed[row] if self._placed[row] is table else 0
            places += range(row * width + known, row * width + len(table))
            blocks += table[known:]
            self._placed[row], self._num_placed[row] = table, len(table)
        self.tables.reshape(-1)[places] = blocks
        if self._is_shared:
            return
        staged_places = upload.add(np.array(places, dtype=np.int64))
        staged_blocks = upload.add(np.array(blocks, dtype=np.int32))
        flat = self.device_tables.view(-1)
        upload.on_arrival(lambda: flat.index_copy_(0, staged_places.tensor, staged_blocks.tensor))
