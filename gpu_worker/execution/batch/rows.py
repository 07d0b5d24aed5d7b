"""A row of the batch for every sequence in it, with its block tables, here and on the device.

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
from gpu_worker.execution.batch.block_tables import BlockTables
from gpu_worker.execution.batch.layout import Int32s, Int64s
from gpu_worker.execution.batch.transfers import Upload


class BatchRows:
    """Hands out rows and keeps their block tables.

    Attributes:
        spare: The row of padding.
        windows: Block tables of the groups of layers that keep the last tokens.
        prompt_lens: `[max_num_seqs + 1]`, prompt tokens of each row's sequence.
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device, num_windows: int = 0) -> None:
        """Make room for `max_num_seqs` sequences of at most `width` blocks, in `num_windows` further groups too."""
        self.spare = max_num_seqs
        self._whole = BlockTables(max_num_seqs + 1, width, device)
        self.windows = [BlockTables(max_num_seqs + 1, width, device) for _ in range(num_windows)]
        self.prompt_lens: Int64s = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """Rows, the spare one included."""
        return len(self.prompt_lens)

    @property
    def tables(self) -> Int32s:
        """Block tables of the layers that keep all tokens, `[num_rows, width]`, as this side knows them."""
        return self._whole.host

    def block_tables(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block tables of these rows, on the device.

        Shapes:
            rows: `[num_seqs]` int64, on the device
            result: `[num_seqs, width]` int32, contiguous
        """
        return self._whole.of(rows)

    def release(self, departed: Iterable[Sequence]) -> None:
        """Take the rows back of sequences that have left the batch; some never had one."""
        for sequence in departed:
            if sequence.row is not None:
                self._free.append(sequence.row)
                for tables in (self._whole, *self.windows):
                    tables.forget(sequence.row)
                sequence.row = None

    def place(self, scheduled: Values[ScheduledSequence], upload: Upload) -> tuple[Int64s, list[Sequence]]:
        """Bring rows and block tables up to date with the scheduled sequences.

        A block table only grows; a sequence that got other blocks has a new list.

        Returns:
            The row of each sequence, and the sequences that are new in the batch.
        """
        rows: list[int] = []
        blocks: list[list[int]] = []
        newcomers: list[Sequence] = []
        for item in scheduled:
            sequence = item.sequence
            row = sequence.row
            if row is None:
                sequence.row = row = self._free.pop()
                self.prompt_lens[row] = sequence.num_prompt_tokens
                newcomers.append(sequence)
            rows.append(row)
            blocks.append(sequence.block_table)
        self._whole.follow(rows, blocks, upload)
        for number, tables in enumerate(self.windows):
            tables.follow(rows, [item.sequence.window_tables[number].blocks for item in scheduled], upload)
        return np.array(rows, dtype=np.int64), newcomers
