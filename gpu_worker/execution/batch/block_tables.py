"""The block table of every row of the batch in one group of layers, here and on the device."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
import torch

from gpu_worker.core.plan import Written
from gpu_worker.execution.batch.layout import Int32s
from gpu_worker.execution.batch.transfers import Upload


class BlockTables:
    """The tables of all rows.

    Attributes:
        host: `[num_rows, width]`, as this side knows them.
        device: The same on the device; on a CPU the same memory.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        """Make room for `num_rows` sequences of at most `width` blocks."""
        self.host: Int32s = np.zeros((num_rows, width), dtype=np.int32)
        self._is_shared = device.type == "cpu"
        self.device = torch.from_numpy(self.host)
        if not self._is_shared:
            self.device = torch.zeros(num_rows, width, dtype=torch.int32, device=device)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block tables of these rows, on the device.

        Shapes:
            rows: `[num_seqs]` int64, on the device
            result: `[num_seqs, width]` int32, contiguous
        """
        if self._is_shared:
            # A third of what torch takes.
            return torch.from_numpy(self.host[rows.numpy()])
        return self.device.index_select(0, rows)

    def write(self, written: Values[Written], upload: Upload) -> None:
        """Bring rows up to date with what was added to the tables of their sequences."""
        width = self.host.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for item in written:
            first = item.row * width + item.first
            places += range(first, first + len(item.ids))
            blocks += item.ids
        self.host.reshape(-1)[places] = blocks
        if self._is_shared:
            return
        staged_places = upload.add(np.array(places, dtype=np.int64))
        staged_blocks = upload.add(np.array(blocks, dtype=np.int32))
        flat = self.device.view(-1)
        upload.on_arrival(lambda: flat.index_copy_(0, staged_places.tensor, staged_blocks.tensor))
