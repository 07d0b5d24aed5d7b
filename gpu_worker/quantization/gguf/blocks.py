"""Unpacks the quantized blocks of GGUF into the engine's form, `w = scale * q + offset` for each group.

All of it is exact: a block's scale has 11 bits and the numbers that it multiplies 8 bits or fewer, so that the products
fit into float32. Source: ggml's block structures; bytes below are offsets into a block.

Bits are moved eight bytes at a time, in int64: what a shift carries from a byte into its neighbour, a mask clears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from gpu_worker.quantization.gguf import table_blocks, tensor_types
from gpu_worker.quantization.gguf.table_blocks import TableNumbers
from gpu_worker.quantization.gguf.tensor_types import TensorType
from kernels.linear.forms import FLOAT4, GroupQuantizedWeight, integers

# So much of a tensor is unpacked at once, which caches hold: memory besides the result stays within a few times this.
_CHUNK_BYTES = 1 << 20

# The exponent of MXFP4 that stands for no number.
_NOT_A_NUMBER = 255

_LOW_BIT = 0x0101010101010101
_LOW_PAIR = 0x0303030303030303
_LOW_HALF = 0x0F0F0F0F0F0F0F0F
_EVEN_BYTES = 0x00FF00FF00FF00FF


class _Groups(NamedTuple):
    """Rows in the engine's form: `values: [rows, ...]` uint8, `scales` and `offsets: [rows, num_groups]` float32."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor


class NonFiniteScaleError(ValueError):
    """A block has a scale that is infinite or not a number."""


def unpack(raw: torch.Tensor, kind: TensorType) -> GroupQuantizedWeight:
    """Unpack `raw: [rows, row_bytes]` uint8, of a type with `bits`; may raise `NonFiniteScaleError`."""
    assert kind.bits is not None
    if kind is tensor_types.MXFP4:
        return _unpack_mxfp4(raw)
    num_rows, columns = raw.shape[0], raw.shape[1] // kind.block_bytes * kind.block_size
    values = raw.new_empty(num_rows, columns * kind.bits // 8)
    scales = raw.new_empty(num_rows, columns // kind.group_size, dtype=torch.float32)
    offsets = torch.empty_like(scales)
    chunk = max(1, _CHUNK_BYTES // raw.shape[1])
    for first in range(0, num_rows, chunk):
        rows = slice(first, first + chunk)
        blocks = raw[rows].view(-1, raw.shape[1] // kind.block_bytes, kind.block_bytes)
        groups = _UNPACKERS[kind](blocks)
        values[rows] = groups.values.flatten(1)
        scales[rows], offsets[rows] = groups.scales, groups.offsets
    if not (scales.isfinite().all() and offsets.isfinite().all()):
        raise NonFiniteScaleError
    return GroupQuantizedWeight(values, integers(kind.bits), kind.group_size, scales, offsets)


def _unpack_mxfp4(raw: torch.Tensor) -> GroupQuantizedWeight:
    """Unpack blocks of an exponent and 16 bytes, whose low halves are the first 16 numbers."""
    blocks = raw.view(raw.shape[0], -1, tensor_types.MXFP4.block_bytes)
    exponents = blocks[..., 0].contiguous()
    if (exponents == _NOT_A_NUMBER).any():
        raise NonFiniteScaleError
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2).flatten(1)
    return GroupQuantizedWeight(FLOAT4.pack(codes), FLOAT4, 32, exponents.view(torch.float8_e8m0fnu))


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Read the float16 number at a byte of every block: `[rows, num_blocks]` float32."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16)[..., 0].float()


def _words(blocks: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return bytes of every block, eight as an int64: `[rows, num_blocks, (end - begin) / 8]`."""
    # A copy in any case: alignment and strides must be those of int64, even where a single block is contiguous.
    return blocks[..., begin:end].clone(memory_format=torch.contiguous_format).view(torch.int64)


def _pieces(words: torch.Tensor, num_bits: int, mask: int) -> torch.Tensor:
    """Return the bits of all bytes, the lowest `num_bits` of each first: `[..., n]` to `[..., 8 / num_bits, n]`."""
    return torch.stack([(words >> shift) & mask for shift in range(0, 8, num_bits)], dim=-2)


def _paired(words: torch.Tensor) -> torch.Tensor:
    """Put the low halves of neighbours into one byte, the even one's below: `[..., n]` int64 to `[..., 4 * n]`."""
    return ((words | (words >> 4)) & _EVEN_BYTES).view(torch.int16).to(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    return _Groups(_paired(_pieces(_words(blocks, 2, 18), 4, _LOW_HALF)), scales, -8 * scales)


def _q4_1(blocks: torch.Tensor) -> _Groups:
    values = _paired(_pieces(_words(blocks, 4, 20), 4, _LOW_HALF))
    return _Groups(values, _half(blocks, 0), _half(blocks, 2))


def _five_bits(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the values of 4 bytes with their highest bits and 16 with the low halves, from `begin` on."""
    # Bit `i` of byte `j` belongs to value `8 * j + i`.
    fifth = torch.stack([(blocks[..., begin : begin + 4] >> bit) & 1 for bit in range(8)], dim=-1).flatten(-2)
    low = _pieces(_words(blocks, begin + 4, begin + 20), 4, _LOW_HALF).view(torch.uint8).flatten(-2)
    return low | (fifth << 4)


def _q5_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    return _Groups(_five_bits(blocks, 2), scales, -16 * scales)


def _q5_1(blocks: torch.Tensor) -> _Groups:
    return _Groups(_five_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> _Groups:
    scales = _half(blocks, 0)
    # Flipping a signed byte's highest bit adds 128.
    return _Groups(blocks[..., 2:] ^ 128, scales, -128 * scales)


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the 8 scales and 8 minima of a block of 256 from 12 bytes.

    Four bytes hold scales 0 to 3, four minima 0 to 3, in their low 6 bits. The last four hold the low halves of scales
    and minima 4 to 7; their upper 2 bits are the highest bits of the first eight bytes.
    """
    scales, minima, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    return (
        torch.cat((scales & 63, (low & 15) | ((scales >> 6) << 4)), dim=-1),
        torch.cat((minima & 63, (low >> 4) | ((minima >> 6) << 4)), dim=-1),
    )


def _k_groups(blocks: torch.Tensor, values: torch.Tensor) -> _Groups:
    """Combine values with the scales that begin a block of Q4_K and Q5_K."""
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    return _Groups(
        values,
        (_half(blocks, 0).unsqueeze(-1) * scales).flatten(1),
        -(_half(blocks, 2).unsqueeze(-1) * minima).flatten(1),
    )


def _low_halves(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return 8 groups, `[rows, num_blocks, 8, 4]` int64, of 128 bytes: each 32 hold two, in low and high halves."""
    packed = torch.unflatten(_words(blocks, begin, begin + 128), -1, (4, 4))
    return _pieces(packed, 4, _LOW_HALF).flatten(-3, -2)


def _q2_k(blocks: torch.Tensor) -> _Groups:
    packed = torch.unflatten(_words(blocks, 16, 80), -1, (2, 4))
    scales = _half(blocks, 80).unsqueeze(-1) * (blocks[..., :16] & 15)
    minima = _half(blocks, 82).unsqueeze(-1) * (blocks[..., :16] >> 4)
    return _Groups(_paired(_pieces(packed, 2, _LOW_PAIR)), scales.flatten(1), -minima.flatten(1))


def _q3_k(blocks: torch.Tensor) -> _Groups:
    low = _pieces(torch.unflatten(_words(blocks, 32, 96), -1, (2, 4)), 2, _LOW_PAIR)
    third = _pieces(_words(blocks, 0, 32), 1, _LOW_BIT)
    # Of 16 factors the low halves stand in 8 bytes, the upper 2 bits in four.
    halves, upper = blocks[..., 96:104], blocks[..., 104:108]
    factors = torch.cat((halves & 15, halves >> 4), dim=-1)
    factors = factors | torch.cat([((upper >> shift) & 3) << 4 for shift in range(0, 8, 2)], dim=-1)
    scales = (_half(blocks, 108).unsqueeze(-1) * (factors.int() - 32)).flatten(1)
    return _Groups(_paired(low.flatten(-3) | (third.flatten(-2) << 2)), scales, -4 * scales)


def _q4_k(blocks: torch.Tensor) -> _Groups:
    return _k_groups(blocks, _paired(_low_halves(blocks, 16)))


def _q5_k(blocks: torch.Tensor) -> _Groups:
    fifth = _pieces(_words(blocks, 16, 48), 1, _LOW_BIT)
    return _k_groups(blocks, (_low_halves(blocks, 48) | (fifth << 4)).view(torch.uint8))


def _q6_k(blocks: torch.Tensor) -> _Groups:
    # Each half of a block is 64 bytes with the low halves of 128 values, and 32 with their upper 2 bits.
    low = _pieces(torch.unflatten(_words(blocks, 0, 128), -1, (2, 8)), 4, _LOW_HALF)
    high = _pieces(torch.unflatten(_words(blocks, 128, 192), -1, (2, 4)), 2, _LOW_PAIR)
    values = (low.flatten(-3) | (high.flatten(-3) << 4)).view(torch.uint8)
    scales = (_half(blocks, 208).unsqueeze(-1) * blocks[..., 192:208].contiguous().view(torch.int8)).flatten(1)
    return _Groups(values, scales, -32 * scales)


def _of_table(read: Callable[[torch.Tensor], TableNumbers]) -> Callable[[torch.Tensor], _Groups]:
    def unpacked(blocks: torch.Tensor) -> _Groups:
        codes, factors = read(blocks)
        scales = (_half(blocks, 0).unsqueeze(-1) * factors).flatten(1)
        return _Groups(codes, scales, -table_blocks.CENTRE * scales)

    return unpacked


def _iq3_s(blocks: torch.Tensor) -> _Groups:
    codes, factors = table_blocks.iq3_s(blocks)
    scales = 2 * (_half(blocks, 0).unsqueeze(-1) * factors).flatten(1)
    return _Groups(codes[..., 0::2] | (codes[..., 1::2] << 4), scales, -7.5 * scales)


_UNPACKERS: Mapping[TensorType, Callable[[torch.Tensor], _Groups]] = {
    tensor_types.Q4_0: _q4_0, tensor_types.Q4_1: _q4_1, tensor_types.Q5_0: _q5_0, tensor_types.Q5_1: _q5_1,
    tensor_types.Q8_0: _q8_0, tensor_types.Q4_K: _q4_k, tensor_types.Q5_K: _q5_k, tensor_types.Q6_K: _q6_k,
    tensor_types.Q2_K: _q2_k, tensor_types.Q3_K: _q3_k,
    tensor_types.IQ2_XXS: _of_table(table_blocks.iq2_xxs),
    tensor_types.IQ2_XS: _of_table(table_blocks.iq2_xs),
    tensor_types.IQ2_S: _of_table(table_blocks.iq2_s),
    tensor_types.IQ3_XXS: _of_table(table_blocks.iq3_xxs),
    tensor_types.IQ3_S: _iq3_s,
    tensor_types.IQ4_NL: _of_table(table_blocks.iq4_nl),
    tensor_types.IQ4_XS: _of_table(table_blocks.iq4_xs),
}  # fmt: skip
