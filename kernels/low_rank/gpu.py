"""Products of adapters by the Triton kernels: where each adapter's matrices are, by slot."""

from __future__ import annotations

import torch

from kernels.low_rank.form import LowRank
from kernels.low_rank.rows import AdapterRows
from kernels.low_rank.triton_kernel import BLOCK_FEATURES, low_rank_triton


class GpuAdapterTable:
    """The parts of all adapters beside one matrix, in the type of its inputs."""

    def __init__(self, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._kept: list[tuple[torch.Tensor, ...]] = [()] * num_slots
        self._addresses = torch.zeros(num_slots, 4, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def pack(self, adapter: LowRank) -> tuple[torch.Tensor, ...]:
        """Bring both matrices, the factors of ranks, and the ranks of each block of features to the device."""
        return tuple(tensor.to(self._device) for tensor in _packed(adapter, self._dtype))

    def place(self, slot: int, packed: tuple[torch.Tensor, ...] | None) -> None:
        """Put what `pack` made into a slot that no step reads, or clear the slot."""
        self._kept[slot] = packed or ()
        if packed is not None:
            self._addresses[slot] = torch.tensor([tensor.data_ptr() for tensor in packed])
        self._ranks[slot] = 0 if packed is None else len(packed[0])

    def add(self, x: torch.Tensor, result: torch.Tensor, rows: AdapterRows) -> None:
        """Do what `AdapterTable` promises."""
        tiles = rows.tiles_on(x.device)
        low_rank_triton(x.to(self._dtype), result, self._addresses, self._ranks, tiles, rows.max_rank)


def _packed(adapter: LowRank, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    num_outputs, _ = adapter.shape
    down = torch.cat([part.down for part in adapter.parts]).to(dtype).contiguous()
    scales = torch.cat([torch.full((part.rank,), part.scale) for part in adapter.parts])
    up = torch.zeros(adapter.rank, num_outputs, dtype=dtype)
    blocks = -(-num_outputs // BLOCK_FEATURES)
    begins, ends, first = torch.full((blocks,), adapter.rank), torch.zeros(blocks, dtype=torch.int64), 0
    for part in adapter.parts:
        up[first : first + part.rank, part.features] = part.up.T.to(dtype)
        touched = torch.tensor(sorted(set((part.features // BLOCK_FEATURES).tolist())))
        begins[touched] = begins[touched].clamp(max=first)
        ends[touched] = first + part.rank
        first += part.rank
    ranges = torch.stack((begins, (ends - begins).clamp(min=0)), dim=1).int()
    return down, up, scales, ranges
