# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Products of adapters on a GPU: tiles of rows of one adapter each, whose matrices are found by their addresses.

No row is padded to the rank of another: a program of the first product that begins behind its adapter's rank ends at
once, and the second product reads, for each block of features, the ranks that these are made of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.low_rank.adapter_rows import TILE_ROWS, AdapterRows, DeviceTiles
from kernels.low_rank.form import LowRank

BLOCK_FEATURES = 64
"""Number of features that share one range of ranks."""
_BLOCK_INPUTS = 128
_BLOCK_RANKS = 16
_NUM_WARPS = 4


@triton.jit
def down_kernel(
    x, addresses, ranks, tiles, rows, products, num_inputs, x_stride, max_rank,
    ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of ranks) multiplies rows by ranks of their adapter's first matrix, and by its scales."""
    slot = tl.load(tiles + tl.program_id(0) * 3)
    first = tl.load(tiles + tl.program_id(0) * 3 + 1)
    count = tl.load(tiles + tl.program_id(0) * 3 + 2)
    rank = tl.load(ranks + slot)
    if tl.program_id(1) * RANKS < rank:
        down = tl.load(addresses + slot * 4).to(tl.pointer_type(x.dtype.element_ty))
        scales = tl.load(addresses + slot * 4 + 2).to(tl.pointer_type(tl.float32))
        places = tl.arange(0, ROWS)
        is_row = places < count
        own = tl.load(rows + first + places, mask=is_row, other=0).to(tl.int64)
        rank_ids = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        is_rank = rank_ids < rank
        sums = tl.zeros([ROWS, RANKS], dtype=tl.float32)
        for start in range(0, num_inputs, INPUTS):
            inputs = start + tl.arange(0, INPUTS)
            is_input = inputs < num_inputs
            values = tl.load(
                x + own[:, None] * x_stride + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0
            )
            offsets = rank_ids[None, :].to(tl.int64) * num_inputs + inputs[:, None]
            weights = tl.load(down + offsets, mask=is_rank[None, :] & is_input[:, None], other=0)
            sums = tl.dot(values, weights, sums, input_precision="ieee")
        sums *= tl.load(scales + rank_ids, mask=is_rank, other=0)[None, :]
        target = products + (first + places)[:, None].to(tl.int64) * max_rank + rank_ids[None, :]
        tl.store(target, sums, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def up_kernel(
    result, addresses, ranks, tiles, rows, products, num_outputs, result_stride, max_rank, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of features) adds the products of the second matrix to the rows of the result."""
    slot = tl.load(tiles + tl.program_id(0) * 3)
    first = tl.load(tiles + tl.program_id(0) * 3 + 1)
    count = tl.load(tiles + tl.program_id(0) * 3 + 2)
    if tl.load(ranks + slot) > 0:
        up = tl.load(addresses + slot * 4 + 1).to(tl.pointer_type(DTYPE))
        ranges = tl.load(addresses + slot * 4 + 3).to(tl.pointer_type(tl.int32))
        begin = tl.load(ranges + tl.program_id(1) * 2)
        end = begin + tl.load(ranges + tl.program_id(1) * 2 + 1)
        places = tl.arange(0, ROWS)
        is_row = places < count
        own = tl.load(rows + first + places, mask=is_row, other=0).to(tl.int64)
        features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
        is_feature = features < num_outputs
        target = result + own[:, None] * result_stride + features[None, :]
        mask = is_row[:, None] & is_feature[None, :]
        sums = tl.load(target, mask=mask, other=0).to(tl.float32)
        for start in range(begin, end, RANKS):
            rank_ids = start + tl.arange(0, RANKS)
            is_rank = rank_ids < end
            sources = products + (first + places)[:, None].to(tl.int64) * max_rank + rank_ids[None, :]
            values = tl.load(sources, mask=is_row[:, None] & is_rank[None, :], other=0)
            offsets = rank_ids[:, None].to(tl.int64) * num_outputs + features[None, :]
            weights = tl.load(up + offsets, mask=is_rank[:, None] & is_feature[None, :], other=0)
            sums = tl.dot(values, weights.to(tl.float32), sums, input_precision="ieee")
        tl.store(target, sums.to(result.dtype.element_ty), mask=mask)


def low_rank_triton(
    x: torch.Tensor,
    result: torch.Tensor,
    addresses: torch.Tensor,
    ranks: torch.Tensor,
    tiles: DeviceTiles,
    max_rank: int,
) -> None:
    """Add to the rows of `result` what their adapters make of `x`.

    Shapes:
        x: `[num_rows, in_features]`, of the type of all adapters
        result: `[num_rows, out_features]`
        addresses: `[num_slots, 4]` int64: of both matrices (`[rank, in_features]`, `[rank, out_features]`), of a factor
            a rank (float32), and of the first rank and the number of ranks (int32) of each block of features
        ranks: `[num_slots]` int32, zero where a slot has nothing beside the matrix
    """
    num_tiles = len(tiles.tiles)
    products = torch.empty(len(tiles.rows), max_rank, dtype=torch.float32, device=x.device)
    down_kernel[(num_tiles, triton.cdiv(max_rank, _BLOCK_RANKS))](
        x,
        addresses,
        ranks,
        tiles.tiles,
        tiles.rows,
        products,
        x.shape[1],
        x.stride(0),
        max_rank,
        ROWS=TILE_ROWS,
        RANKS=_BLOCK_RANKS,
        INPUTS=_BLOCK_INPUTS,
        num_warps=_NUM_WARPS,
    )
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    up_kernel[(num_tiles, triton.cdiv(result.shape[1], BLOCK_FEATURES))](
        result,
        addresses,
        ranks,
        tiles.tiles,
        tiles.rows,
        products,
        result.shape[1],
        result.stride(0),
        max_rank,
        DTYPE=dtypes[x.dtype],
        ROWS=TILE_ROWS,
        RANKS=_BLOCK_RANKS,
        FEATURES=BLOCK_FEATURES,
        num_warps=_NUM_WARPS,
    )


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
