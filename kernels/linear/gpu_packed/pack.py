"""Packs matrices for the GPU's kernels. Done once, when weights are loaded, on the device that they are on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gpu_config import has_kernels
from kernels.linear.forms import CodedMatrix, Number, QuantizedWeight
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
    assert can_pack(matrix)
    number, scales = matrix.number, matrix.scales
    codes, centred = _centred(matrix)
    (rows, columns), group_size = codes.shape, matrix.group_size
    if group_size >= columns:
        group_size = -(-columns // (4 * PLANES[0])) * 4 * PLANES[0]
    plane = next(plane for plane in PLANES if group_size % plane == 0)
    words = _pack_words(number, codes, plane)
    padded_rows, num_blocks = words.shape[0] * TILE_ROWS, words.shape[1]
    num_groups = -(-num_blocks * num_planes(number) * plane // group_size)

    def by_group(parts: torch.Tensor) -> torch.Tensor:
        padding = (0, num_groups - parts.shape[1], 0, padded_rows - rows)
        return F.pad(parts, padding).t().contiguous()

    return PackedMatrix(
        number,
        words,
        by_group(scales),
        None if centred is None else by_group(centred),
        group_size,
        rows,
        columns,
        matrix.input_order,
        torch.zeros(padded_rows // TILE_ROWS, dtype=torch.int32, device=codes.device),
    )


def _centred(matrix: CodedMatrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return codes, and what is left of offsets when a GPU subtracts the numbers' centre from codes; None if nothing.

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
    """Return the code that stands for zero in all groups, if it is the same in all."""
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
