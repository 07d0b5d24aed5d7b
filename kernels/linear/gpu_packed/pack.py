"""Packs matrices for the GPU's kernels. Done once, when weights are loaded, on the device that they are on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear.gpu_packed.matrix import CENTRES, NUM_PLANES, ROW_MULTIPLE, TILE_ROWS, Kind, PackedMatrix

_WIDE_PLANE, _NARROW_PLANE = 64, 32


def can_pack(group_size: int, in_features: int) -> bool:
    """Return True for groups that the kernels support: multiples of 32 columns, or whole rows."""
    return group_size % _NARROW_PLANE == 0 or group_size >= in_features


def pack_matrix(
    kind: Kind,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    group_size: int,
    input_order: torch.Tensor | None = None,
) -> PackedMatrix:
    """Pack a matrix `scale * q + offset`, q unsigned or float8; the plain one can be freed afterwards.

    Shapes:
        values: `[out_features, in_features]` uint8: of "int4" values up to 15, of "fp8" the bits of float8_e4m3fn.
        scales, offsets: `[out_features, ceil(in_features / group_size)]` float32; offsets may be None.
        input_order: `[in_features]` int64
    """
    assert can_pack(group_size, values.shape[1])
    rows, columns = values.shape
    if group_size >= columns:
        group_size = -(-columns // (4 * _WIDE_PLANE)) * 4 * _WIDE_PLANE
    plane = _WIDE_PLANE if group_size % _WIDE_PLANE == 0 else _NARROW_PLANE
    words = _pack_words(kind, values, plane)
    padded_rows, num_blocks = words.shape[0] * TILE_ROWS, words.shape[1]
    centre = CENTRES[kind]
    centred = None if offsets is None else offsets + centre * scales
    if centred is None and centre:
        centred = centre * scales
    if centred is not None and not bool(centred.any()):
        centred = None
    num_groups = -(-num_blocks * NUM_PLANES[kind] * plane // group_size)

    def by_group(parts: torch.Tensor) -> torch.Tensor:
        padding = (0, num_groups - parts.shape[1], 0, padded_rows - rows)
        return F.pad(parts, padding).t().contiguous()

    return PackedMatrix(
        kind,
        words,
        by_group(scales),
        None if centred is None else by_group(centred),
        group_size,
        rows,
        columns,
        input_order,
        torch.zeros(padded_rows // TILE_ROWS, dtype=torch.int32, device=values.device),
    )


def _pack_words(kind: Kind, values: torch.Tensor, plane: int) -> torch.Tensor:
    num_planes = NUM_PLANES[kind]
    rows, columns = values.shape
    padding = (0, -columns % (num_planes * plane), 0, -rows % ROW_MULTIPLE)
    values = F.pad(values, padding, value=CENTRES[kind])
    values = values.view(values.shape[0], -1, num_planes, plane)
    words = values[:, :, 0].to(torch.int16)
    for index in range(1, num_planes):
        words |= values[:, :, index].to(torch.int16) << (16 // num_planes * index)
    return words.view(-1, TILE_ROWS, words.shape[1], plane).transpose(1, 2).contiguous()
