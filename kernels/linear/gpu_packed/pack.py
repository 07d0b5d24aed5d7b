"""Packs matrices for the GPU's kernels. Done once, when weights are loaded, on the device that they are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.gpu_config import has_kernels
from kernels.linear.forms import CodedMatrix, Number, QuantizedWeight
from kernels.linear.gpu_packed.group_numbers import GroupLayout, GroupNumbers
from kernels.linear.gpu_packed.matrix import ROW_MULTIPLE, TILE_ROWS, PackedMatrix, num_planes

# Columns of a plane, the widest that divides a group first. Matrix instructions take 16 columns at a time.
PLANES = (64, 32, 16)


def pack_for_gpu(form: QuantizedWeight) -> PackedMatrix | None:
    """Pack a matrix for the kernels of its device, or return None where there are none for it.

    Inputs are not rounded, even where the form says so: results are closer to exact ones.
    """
    if not has_kernels(form.values.device):
        return None
    matrix = form.coded()
    return pack_matrix(matrix) if can_pack(matrix) else None


def can_pack(matrix: CodedMatrix) -> bool:
    """Return True for groups that the kernels support: multiples of 16 columns, or whole rows."""
    return matrix.group_size % PLANES[-1] == 0 or matrix.group_size >= matrix.codes.shape[1]


def pack_matrix(matrix: CodedMatrix) -> PackedMatrix:
    """Pack a matrix; the plain one can be freed afterwards."""
    return pack_matrices([matrix])[0]


def pack_matrices(matrices: Sequence[CodedMatrix]) -> list[PackedMatrix]:
    """Pack matrices of one number, shape and group size alike: where one has offsets or wide scales, all have."""
    first = matrices[0]
    assert can_pack(first)
    (rows, columns), group_size, planes = first.codes.shape, first.group_size, num_planes(first.number)
    if group_size >= columns:
        group_size = -(-columns // (4 * PLANES[0])) * 4 * PLANES[0]
    plane = next(plane for plane in PLANES if group_size % plane == 0)
    centred = [_centred(matrix) for matrix in matrices]
    words = [_pack_words(first.number, codes, plane) for codes, _ in centred]
    padded_rows = words[0].shape[0] * TILE_ROWS
    layout = GroupLayout(group_size, plane, planes, words[0].shape[1])
    scales = layout.pack([matrix.scales for matrix in matrices], padded_rows)
    offsets: Sequence[GroupNumbers | None] = [None] * len(matrices)
    if any(of_matrix is not None for _, of_matrix in centred):
        zeros = torch.zeros_like(first.scales)
        offsets = layout.pack([zeros if of_matrix is None else of_matrix for _, of_matrix in centred], padded_rows)
    counters = [torch.zeros(len(words[0]), dtype=torch.int32, device=words[0].device) for _ in matrices]
    orders = [matrix.input_order for matrix in matrices]
    sizes = group_size, rows, columns
    parts = zip(words, scales, offsets, orders, counters, strict=True)
    return [
        PackedMatrix(first.number, of_words, scale, offset, *sizes, order, of_tiles)
        for of_words, scale, offset, order, of_tiles in parts
    ]


def _centred(matrix: CodedMatrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return codes, and the offsets that remain when a GPU subtracts the numbers' centre from codes; None if none do.

    Codes of fewer bits than their number has may stand around another zero, as six bits in a byte do: they are moved,
    which is exact and saves a product and a reading a group.
    """
    number, codes, scales = matrix.number, matrix.codes, matrix.scales
    offsets = torch.zeros_like(scales) if matrix.offsets is None else matrix.offsets
    if (zero := _common_zero(scales, offsets)) is not None and number.is_integer:
        moved = codes.int() + (number.centre - zero)
        if int(moved.min()) >= 0 and int(moved.max()) < 2**number.bits:
            return moved.to(torch.uint8), None
    centred = offsets + number.centre * scales
    return codes, centred if bool(centred.any()) else None


def _common_zero(scales: torch.Tensor, offsets: torch.Tensor) -> int | None:
    is_used = scales != 0
    if not bool(is_used.any()):
        return None
    zero = -(offsets[is_used][0] / scales[is_used][0]).round()
    return int(zero) if torch.equal(offsets, -zero * scales) else None


def _pack_words(number: Number, codes: torch.Tensor, plane: int) -> torch.Tensor:
    planes = num_planes(number)
    rows, columns = codes.shape
    padding = (0, -columns % (planes * plane), 0, -rows % ROW_MULTIPLE)
    codes = F.pad(codes, padding, value=number.centre)
    codes = codes.view(codes.shape[0], -1, planes, plane)
    words = codes[:, :, 0].to(torch.int16)
    for index in range(1, planes):
        words |= codes[:, :, index].to(torch.int16) << (number.bits * index)
    return words.view(-1, TILE_ROWS, words.shape[1], plane).transpose(1, 2).contiguous()
