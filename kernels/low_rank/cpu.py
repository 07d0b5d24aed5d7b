"""Products of adapters by the compiled CPU kernel (`cpu.cpp`).

A matrix has a table with the address of each adapter's part by the adapter's slot. Tables stay where they are, so that
the kernels that compute whole steps may hold their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import LowRankHalfStructure, LowRankStructure
from kernels.linear.dense.cpu import panel_rows
from kernels.low_rank.adapter_rows import AdapterRows
from kernels.low_rank.form import PAGE_BYTES, LowRank, whole_pages

# Matrices begin where a cache line does.
_LINE = 64
_PARTS = ("halves", "scales", "down", "up")
_HALF = np.dtype([("offset", np.int32), ("first", np.int16), ("count", np.int16)])
assert ctypes.sizeof(LowRankHalfStructure) == _HALF.itemsize


@dataclass(slots=True, eq=False)
class CpuLowRank:
    """An adapter's part in the order in which it is read, and its description, which holds addresses in `memory`."""

    memory: torch.Tensor
    structure: LowRankStructure

    def move(self, memory: torch.Tensor) -> None:
        """Move to other memory of the same size."""
        distance = memory.copy_(self.memory).data_ptr() - self.memory.data_ptr()
        for name in _PARTS:
            setattr(self.structure, name, getattr(self.structure, name) + distance)
        self.memory = memory


def join(packed: Iterable[object]) -> None:
    """Move all parts of an adapter side by side, to pages of its own, before any is placed; any thread may do so.

    Else the processor looks up an address for every few ranks: a third of the time that 32 adapters take.
    """
    parts = [part for part in packed if isinstance(part, CpuLowRank)]
    sizes = [len(part.memory) for part in parts]
    # One page more: torch begins anywhere in one. Unwritten pages take no memory.
    memory = torch.empty(whole_pages(sum(sizes)) + PAGE_BYTES, dtype=torch.uint8)
    places = memory[-memory.data_ptr() % PAGE_BYTES :][: sum(sizes)].split_with_sizes(sizes)
    for part, place in zip(parts, places, strict=True):
        part.move(place)


class CpuAdapterTable:
    """The parts of all adapters beside one matrix.

    Attributes:
        address: Of the table, whose rank is zero in every slot without an adapter. Descriptions stand side by side: a
            step reads each once, and would wait for memory anywhere else.
    """

    def __init__(self, library: CpuLibrary, num_slots: int, dtype: torch.dtype, *, is_lookup: bool = False) -> None:
        """Hold nothing yet."""
        self._library = library
        self._dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        self._is_lookup = is_lookup
        self._table = (LowRankStructure * num_slots)()
        self._packed: list[CpuLowRank | None] = [None] * num_slots
        self._is_empty = True
        self.address = ctypes.addressof(self._table)

    def pack(self, adapter: LowRank) -> CpuLowRank:
        """Lay the second matrices out by half panels, each with the ranks that it is made of and no others."""
        is_half = self._dtype is torch.bfloat16 or all(part.down.dtype is torch.bfloat16 for part in adapter.parts)
        dtype = torch.bfloat16 if is_half else torch.float32
        return _pack(adapter, self._library.panel_width(), dtype, self._dtype, is_lookup=self._is_lookup)

    def place(self, slot: int, packed: CpuLowRank | None) -> None:
        """Put what `pack` made into a slot that no step reads, or clear the slot."""
        self._table[slot] = LowRankStructure() if packed is None else packed.structure
        self._packed[slot] = packed
        self._is_empty = not any(self._packed)

    def add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        """Do what `AdapterTable` promises. Mostly nothing is beside a head, which is the largest matrix."""
        if self._is_empty:
            return
        if torch.float16 in (x.dtype, result.dtype) or x.dtype is not self._dtype:
            wide = result.float()
            self._add(x.to(self._dtype), wide, rows)
            result.copy_(wide)
            return
        self._add(x, result, rows)

    def _add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        assert result.stride(1) == 1
        dtypes = DTYPE_NUMBERS[x.dtype], DTYPE_NUMBERS[result.dtype]
        self._library.low_rank(
            *(self.address, rows.cpu.address, x.data_ptr(), result.data_ptr(), x.stride(0), result.stride(0)),
            *(*dtypes, result.shape[1], torch.get_num_threads()),
        )


def _pack_down(down: torch.Tensor, width: int, row_dtype: torch.dtype) -> torch.Tensor:
    """Lay a first matrix out in blocks of half a panel, of which a word of two numbers has one of either half."""
    down = F.pad(down, (0, -down.shape[1] % (width // 2)))
    if down.dtype is torch.bfloat16 and row_dtype is torch.float32:
        down = down.view(len(down), -1, 2, width // 4).transpose(2, 3).reshape(len(down), -1)
    return down


def _pack(adapter: LowRank, width: int, dtype: torch.dtype, row_dtype: torch.dtype, *, is_lookup: bool) -> CpuLowRank:
    num_outputs, num_inputs = adapter.shape
    down = torch.cat([part.down.to(dtype) for part in adapter.parts])
    down = (down.T if is_lookup else _pack_down(down, width, row_dtype)).contiguous()
    scales = torch.cat([torch.full((part.rank,), part.scale) for part in adapter.parts])
    features = panel_rows(torch.arange(1, num_outputs + 1)[:, None], width, adapter.is_gated).view(-1, width // 2) - 1
    # Of each part, where its features are among its own; one more, for all others, is zero.
    pairs, first = [], 0
    for part in adapter.parts:
        places = torch.full((num_outputs + 1,), len(part.features))
        places[part.features] = torch.arange(len(part.features))
        pairs.append((first, F.pad(part.up.to(dtype), (0, 0, 0, 1)), places[features]))
        first += part.rank
    halves, blocks, offset = np.zeros(len(features) + 1, dtype=_HALF), [], 0
    for half in range(len(features)):
        halves[half]["offset"] = offset
        touching = [(first, up, of[half]) for first, up, of in pairs if bool((of[half] < len(up) - 1).any())]
        if not touching:
            continue
        begin = touching[0][0]
        end = touching[-1][0] + touching[-1][1].shape[1]
        is_odd = dtype is torch.bfloat16 and (end - begin) % 2
        block = torch.zeros(end - begin + is_odd, width // 2, dtype=dtype)
        for first, up, places in touching:
            block[first - begin : first - begin + up.shape[1]] = up[places].T
        halves[half] = (offset, begin, end - begin)
        if dtype is torch.bfloat16:
            block = block.view(-1, 2, width // 2).transpose(1, 2)
        blocks.append(block)
        offset += 2 * block.numel() // width
    halves[-1]["offset"] = offset
    up = torch.cat([block.reshape(-1) for block in blocks])
    parts = [each.reshape(-1).view(torch.uint8) for each in (torch.from_numpy(halves.view(np.uint8)), scales, down, up)]
    parts = [F.pad(each, (0, -len(each) % _LINE)) for each in parts]
    memory = torch.cat(parts)
    starts = accumulate((len(each) for each in parts[:-1]), initial=memory.data_ptr())
    return CpuLowRank(memory, LowRankStructure(*starts, adapter.rank, num_inputs, DTYPE_NUMBERS[dtype]))
