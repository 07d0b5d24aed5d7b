"""Which rows of a step have an adapter, as the kernels of each device read them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu_structures import AdapterRowsStructure

Int32s = npt.NDArray[np.int32]

TILE_ROWS = 16
"""Of one adapter, that a program of a GPU takes."""


def _sorted_rows(slots: Int32s) -> Int32s:
    rows = np.flatnonzero(slots >= 0)
    return rows[np.argsort(slots[rows], kind="stable")].astype(np.int32)


class CpuAdapterRows:
    """The rows with an adapter as the kernels of a CPU read them. One thread at a time multiplies by them."""

    __slots__ = ("_kept", "_structure", "address")

    def __init__(self, slots: Int32s, max_rank: int, num_products: int) -> None:
        rows = _sorted_rows(slots)
        places = np.full(len(slots), -1, dtype=np.int32)
        places[rows] = np.arange(len(rows), dtype=np.int32)
        # Zeros: the kernel reads a rank more where their number is odd.
        stride = max_rank + max_rank % 2
        products = np.zeros((len(rows) * num_products, stride), dtype=np.float32)
        # The structure holds addresses only.
        self._kept = (rows, slots[rows], places, products)
        self._structure = AdapterRowsStructure(*(array.ctypes.data for array in self._kept), len(rows), stride)
        self.address = ctypes.addressof(self._structure)

    def clear(self) -> None:
        """Forget the products of the step before: zero times one that is not finite would be none."""
        self._kept[-1].fill(0)


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The rows with an adapter as the kernels of a GPU read them.

    Attributes:
        tiles: `[num_tiles, 3]` int32: slot, first row and number of rows of each tile, whose rows have one adapter.
        rows: `[num_rows]` int32, sorted by slot.
    """

    tiles: torch.Tensor
    rows: torch.Tensor


class AdapterRows:
    """Which rows of a step have an adapter.

    Attributes:
        slots: `[num_rows]` int32, of each row; below zero without an adapter.
        max_rank: Of the adapters in these slots, beside any matrix.
        num_products: Matrices that a row is multiplied by at once: as many as it has experts.
    """

    __slots__ = ("_cpu", "_tiles", "max_rank", "num_products", "slots")

    def __init__(self, slots: Int32s, max_rank: int, num_products: int = 1) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.num_products = num_products
        self._cpu: CpuAdapterRows | None = None
        self._tiles: DeviceTiles | None = None

    @property
    def cpu(self) -> CpuAdapterRows:
        """As the CPU kernels read them."""
        if self._cpu is None:
            self._cpu = CpuAdapterRows(self.slots, self.max_rank, self.num_products)
        return self._cpu

    def tiles_on(self, device: torch.device) -> DeviceTiles:
        """As the kernels of a GPU read them."""
        if self._tiles is None:
            rows = _sorted_rows(self.slots)
            slots, counts = np.unique(self.slots[rows], return_counts=True)
            tiles, first = [], 0
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                begins = range(first, first + count, TILE_ROWS)
                first += count
                tiles += [(slot, begin, min(TILE_ROWS, first - begin)) for begin in begins]
            arrays = (np.array(tiles, dtype=np.int32), rows)
            self._tiles = DeviceTiles(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))
        return self._tiles

    def clear(self) -> None:
        """Prepare for another step whose rows have the same adapters."""
        if self._cpu is not None:
            self._cpu.clear()

    def of(self, rows: npt.NDArray[Any]) -> AdapterRows | None:
        """Return the same of some of the rows; None where none of these has an adapter."""
        slots = self.slots[rows]
        return AdapterRows(slots, self.max_rank, self.num_products) if (slots >= 0).any() else None
