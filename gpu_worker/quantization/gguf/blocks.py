"""Unpacks the quantized blocks of GGUF into the engine's form, `w = scale * q + offset` for each group.

All of it is exact: a block's scale has 11 bits and the numbers that it multiplies 8 bits or fewer, so that the products
fit into float32. Source: ggml's block structures; bytes below are offsets into a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from gpu_worker.quantization.gguf import tensor_types
from gpu_worker.quantization.gguf.tensor_types import TensorType
from gpu_worker.quantization.weight_forms import GroupQuantizedWeight

# So much of a tensor is unpacked at once: what is needed besides the result stays within a few times this.
_CHUNK_BYTES = 8 << 20


class _Groups(NamedTuple):
    """Unpacked groups: `values: [rows, num_groups, group_size]` uint8; `scales`, `offsets`: `[rows, num_groups]`."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


class NonFiniteScaleError(ValueError):
    """A block has a scale that is infinite or not a number."""


def unpack(raw: torch.Tensor, kind: TensorType) -> GroupQuantizedWeight:
    """Unpack the rows of a tensor.

    Shapes:
        raw: `[rows, row_bytes]` uint8, of a type that has `bits`

    Raises:
        NonFiniteScaleError: A scale or an offset is not a finite number.
    """
    assert kind.bits is not None
    num_rows, columns = raw.shape[0], raw.shape[1] // kind.block_bytes * kind.block_size
    values = raw.new_empty(num_rows, columns * kind.bits // 8)
    scales = raw.new_empty(num_rows, columns // kind.group_size, dtype=torch.float32)
    offsets = torch.empty_like(scales)
    chunk = max(1, _CHUNK_BYTES // raw.shape[1])
    for first in range(0, num_rows, chunk):
        rows = slice(first, first + chunk)
        blocks = raw[rows].view(-1, raw.shape[1] // kind.block_bytes, kind.block_bytes)
        groups = _UNPACKERS[kind](blocks)
        values[rows] = (_pack_nibbles(groups.values) if kind.bits == 4 else groups.values).flatten(1)
        scales[rows], offsets[rows] = groups.scales, groups.offsets
    if not (scales.isfinite().all() and offsets.isfinite().all()):
        raise NonFiniteScaleError
    return GroupQuantizedWeight(values, kind.bits, kind.group_size, scales, offsets)


def _pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Put two values into a byte, the one of the even column into its low half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Read the float16 number at a byte of every block: `[rows, num_blocks]` float32."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, then the high halves: `[..., n]` to `[..., 2 * n]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: torch.Tensor, shifts: torch.Tensor, mask: int) -> torch.Tensor:
    """Return the bits of every byte at each of `shifts`: `[..., n]` to `[..., len(shifts), n]`."""
    return (packed.unsqueeze(-2) >> shifts[:, None]) & mask


def _shifts(blocks: torch.Tensor, count: int, step: int) -> torch.Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=blocks.device)


def _q4_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    return _Groups(_nibbles(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(blocks: torch.Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    # Bit `i` of byte `j` belongs to value `8 * j + i`.
    fifth = (blocks[..., 2:6, None] >> _shifts(blocks, 8, 1)) & 1
    return _Groups(_nibbles(blocks[..., 6:]) | (fifth.flatten(-2) << 4), scales, -16 * scales)


def _q8_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    # Flipping a signed byte's highest bit adds 128.
    return _Groups(blocks[..., 2:] ^ 128, scales, -128 * scales)


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the 8 scales and 8 minima of a block of 256 from 12 bytes.

    Four bytes hold scales 0 to 3, four minima 0 to 3, in their low 6 bits. The last four hold the low halves of scales
    and minima 4 to 7; their upper 2 bits are the highest bits of the first eight bytes.
    """
    scales, minima, low = torch.unflatten(packed, -1, (3, 4)).unbind(-2)
    return (
        torch.cat((scales & 63, (low & 15) | ((scales >> 6) << 4)), dim=-1),
        torch.cat((minima & 63, (low >> 4) | ((minima >> 6) << 4)), dim=-1),
    )


def _k_groups(blocks: torch.Tensor, values: torch.Tensor) -> _Groups:
    """Combine `values: [rows, num_blocks, 8, 32]` with the scales that begin a block of Q4_K and Q5_K."""
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    return _Groups(
        values.flatten(1, 2),
        (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1),
        -(_half(blocks, 2).unsqueeze(-1) * minima).flatten(1),
    )


def _low_halves(packed: torch.Tensor) -> torch.Tensor:
    """Return groups of 32 from bytes that hold two of them, in 32 low and 32 high halves: `[..., 8, 32]`."""
    return _bits(torch.unflatten(packed, -1, (4, 32)), _shifts(packed, 2, 4), 15).flatten(-3, -2)


def _q4_k(blocks: torch.Tensor) -> _Groups:
    return _k_groups(blocks, _low_halves(blocks[..., 16:]))


def _q5_k(blocks: torch.Tensor) -> _Groups:
    fifth = _bits(blocks[..., 16:48], _shifts(blocks, 8, 1), 1)
    return _k_groups(blocks, _low_halves(blocks[..., 48:]) | (fifth << 4))


def _q6_k(blocks: torch.Tensor) -> _Groups:
    # Each half of a block is 64 bytes with the low halves of 128 values, and 32 with their upper 2 bits.
    low = _bits(torch.unflatten(blocks[..., :128], -1, (2, 64)), _shifts(blocks, 2, 4), 15)
    high = _bits(torch.unflatten(blocks[..., 128:192], -1, (2, 32)), _shifts(blocks, 4, 2), 3)
    values = low.flatten(-3) | (high.flatten(-3) << 4)
    scales = _half(blocks, 208).unsqueeze(-1) * blocks[..., 192:208].contiguous().view(torch.int8)
    scales = scales.flatten(1)
    return _Groups(torch.unflatten(values.flatten(1), -1, (-1, 16)), scales, -32 * scales)


_UNPACKERS: Mapping[TensorType, Callable[[torch.Tensor], _Groups]] = MappingProxyType(
    {
        tensor_types.Q4_0: _q4_0,
        tensor_types.Q4_1: _q4_1,
        tensor_types.Q5_0: _q5_0,
        tensor_types.Q8_0: _q8_0,
        tensor_types.Q4_K: _q4_k,
        tensor_types.Q5_K: _q5_k,
        tensor_types.Q6_K: _q6_k,
    }
)
