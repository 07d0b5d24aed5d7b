"""Sums and gathers of processes that share memory, by the compiled kernel (`cpu.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import CpuLibrary
from kernels.cpu_structures import ExchangeStructure

_LINE_BYTES = 64
SLOT_BYTES = 4 << 20
"""Of what a process puts down at a time, unless more is asked for."""
_SUMMED = (torch.float32, torch.bfloat16)


class ExchangeEndedError(Exception):
    """Somebody has said that the processes do nothing together any more."""


def exchange_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the memory that `size` processes share: a line each for its counter, and two slots each."""
    return exchange_counters_bytes(size) + 2 * size * slot_bytes


def exchange_counters_bytes(size: int) -> int:
    """Return how much of it, from its beginning, has to be zero before anybody begins."""
    return size * _LINE_BYTES


class Exchange:
    """One of several processes. All call the same, in the same order, and wait for one another in each call."""

    def __init__(
        self,
        library: CpuLibrary,
        ended: int,
        memory: int,
        rank: int,
        size: int,
        owner: object,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Join: `memory` is at `exchange_bytes()` zeros, `ended` at an int64, not zero once others have ended."""
        self._library = library
        self._owner = owner
        self._memory = (ended, memory, memory + exchange_counters_bytes(size))
        self.rank = rank
        self.slot_bytes = slot_bytes
        self._size = size
        self._structure = ExchangeStructure(*self._memory, slot_bytes, rank, size)
        self.address = ctypes.addressof(self._structure)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all tensors, added in the order of ranks: the same bits everywhere. `x` may be overwritten.

        Raises:
            ExchangeEndedError: They do nothing together any more.
        """
        data = x.contiguous() if x.dtype in _SUMMED else x.float().contiguous()
        is_bfloat16 = data.dtype is torch.bfloat16
        self.check(
            self._library.exchange_sum(
                *self._memory, data.data_ptr(), self.slot_bytes, data.numel(), self.rank, self._size, is_bfloat16
            )
        )
        return data.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, size * num_columns]`, the columns in the order of ranks.

        Raises:
            ExchangeEndedError: They do nothing together any more.
        """
        x = x.contiguous()
        num_rows, row_bytes = x.shape[0], x.shape[1] * x.itemsize
        result = x.new_empty(num_rows, self._size * x.shape[1])
        target = result.data_ptr()
        self.check(
            self._library.exchange_gather(
                *self._memory, x.data_ptr(), target, self.slot_bytes, num_rows, row_bytes, self.rank, self._size
            )
        )
        return result

    @staticmethod
    def check(has_ended: int) -> None:
        """Raise `ExchangeEndedError` if others have ended."""
        if has_ended:
            raise ExchangeEndedError
