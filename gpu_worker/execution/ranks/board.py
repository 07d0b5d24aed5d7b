"""Memory that all ranks of a group see: what each writes of its life, whether the group has ended, and what they sum.

The memory has no name that could outlive it or be another group's: rank 0 makes it, and the other ranks inherit its
descriptor. Numbers of 64 bits are written whole, each by one rank.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import NamedTuple

import numpy as np

from kernels.collectives import SLOT_BYTES, Exchange, exchange_bytes, exchange_counters_bytes
from kernels.cpu_library import CpuLibrary

# A cache line a rank, so that ranks do not wait for one another's writes.
_LINE_BYTES = 64
_TICKS, _STEP, _LOADS = 0, 1, 2


class Life(NamedTuple):
    """What a rank shows of its life: how often it has, which step it computed last, how often its weights were read."""

    ticks: int
    step: int
    loads: int


class Board:
    """Lines of numbers: the group's first, then one for each rank. The slots for sums follow."""

    def __init__(self, fd: int, size: int) -> None:
        """Take the memory behind a descriptor, which is as large as `make_board` made it."""
        self.fd = fd
        self._size = size
        num_bytes = os.fstat(fd).st_size
        self._slot_bytes = (num_bytes - _lines_bytes(size) - exchange_counters_bytes(size)) // (2 * size)
        self._memory = mmap.mmap(fd, num_bytes)
        lines = np.frombuffer(self._memory, dtype=np.int64, count=_lines_bytes(size) // 8)
        self._lines = lines.reshape(-1, _LINE_BYTES // 8)

    @property
    def has_ended(self) -> bool:
        """Whether the group has ended."""
        return bool(self._lines[0, 0])

    def end(self) -> None:
        """Say that the group has ended."""
        self._lines[0, 0] = 1

    def begin_again(self) -> None:
        """Prepare for ranks that meet anew. No rank may be in a sum or a gather."""
        start = _lines_bytes(self._size)
        self._memory[start : start + exchange_counters_bytes(self._size)] = bytes(exchange_counters_bytes(self._size))
        self._lines[0, 0] = 0

    def exchange(self, rank: int, library: CpuLibrary) -> Exchange:
        """Return what sums tensors with the other ranks."""
        ended: int = self._lines.ctypes.data
        return Exchange(
            library, ended, ended + _lines_bytes(self._size), rank, self._size, self._memory, self._slot_bytes
        )

    def tick(self, rank: int) -> None:
        """Say that a rank's process runs."""
        self._lines[1 + rank, _TICKS] += 1

    def note_step(self, rank: int, step: int) -> None:
        """Say which step a rank computed last."""
        self._lines[1 + rank, _STEP] = step

    def note_load(self, rank: int) -> None:
        """Say that a rank has read its part of the weights."""
        self._lines[1 + rank, _LOADS] += 1

    def life(self, rank: int) -> Life:
        """Return what a rank has said."""
        return Life(*map(int, self._lines[1 + rank, : len(Life._fields)]))


def _lines_bytes(size: int) -> int:
    return (1 + size) * _LINE_BYTES


def make_board(size: int, slot_bytes: int = SLOT_BYTES) -> Board:
    """Make the memory, all zeros; it is gone with the last process that has it.

    Args:
        size: Number of ranks.
        slot_bytes: Bytes that a rank can write at a time, a multiple of 64. Unwritten bytes take no memory.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headrace-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _lines_bytes(size) + exchange_bytes(size, slot_bytes))
    return Board(fd, size)
