"""What the device keeps for each row of the batch: one table a quantity, written when a sequence gets its row."""

from __future__ import annotations

from collections.abc import Sequence as Values
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.execution.batch.transfers import DTYPES, StagedArray, Upload


class RowTable:
    """A table with one entry for each row. On a CPU there is nothing to carry, and it is written in place.

    Attributes:
        values: `[num_rows, *entry]`, on the device.
    """

    def __init__(
        self, num_rows: int, dtype: npt.DTypeLike, device: torch.device, entry: tuple[int, ...] = (), fill: float = 0
    ) -> None:
        """Allocate it.

        Args:
            num_rows: Rows of the batch.
            dtype: int32, int64 or float32.
            device: Where it is read.
            entry: Shape of an entry.
            fill: What rows hold before they are written.
        """
        shape = (num_rows, *entry)
        self._host: npt.NDArray[np.generic] | None = None
        self._dtype = np.dtype(dtype)
        if device.type == "cpu":
            # Zeros from NumPy take no memory before they are written.
            self._host = np.full(shape, fill, dtype=dtype) if fill else np.zeros(shape, dtype=dtype)
            self.values = torch.from_numpy(self._host)
        else:
            self.values = torch.full(shape, fill, dtype=DTYPES[self._dtype], device=device)

    def write(self, rows: Values[int], entries: npt.ArrayLike, upload: Upload) -> None:
        """Set the entries of some rows when the upload arrives.

        Args:
            rows: Each at most once.
            entries: One for each of them.
            upload: Carries them.
        """
        array = np.asarray(entries, dtype=self._dtype)
        if self._host is not None:
            self._host[rows] = array
            return
        index, staged = upload.add(np.array(rows, dtype=np.int64)), upload.add(array)
        upload.on_arrival(partial(_copy, self.values, index, staged))


def _copy(values: torch.Tensor, index: StagedArray, staged: StagedArray) -> None:
    values.index_copy_(0, index.tensor, staged.tensor)
