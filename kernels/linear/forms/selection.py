"""Some rows or columns of a matrix, in the same form where that can be.

Where rows or columns that share scales are taken apart, groups along the input become smaller, and other matrices are
made dense, in float32: that costs memory, never accuracy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kernels.linear.forms.dense import DenseWeight
from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import SplitWeight, UnsplitWeight, WeightForm, concatenate


def select_rows(form: WeightForm, rows: torch.Tensor) -> WeightForm:
    """Return the matrix whose row `i` is row `rows[i]` of `form`, which may be there more than once.

    Shapes:
        rows: `[num_rows]` int64, on any device
    """
    if not isinstance(form, SplitWeight):
        return _rows(form, rows)
    starts = torch.tensor([0, *(part.shape[0] for part in form.parts)]).cumsum(0)
    places = torch.bucketize(rows.cpu(), starts[1:], right=True)
    runs, counts = torch.unique_consecutive(places, return_counts=True)
    chosen = zip(runs.tolist(), rows.cpu().split_with_sizes(counts.tolist()), strict=True)
    return concatenate([_rows(form.parts[place], own - starts[place]) for place, own in chosen])


def select_columns(form: WeightForm, columns: range) -> tuple[WeightForm, torch.Tensor | None]:
    """Return neighbouring columns as they are stored, and the input features that they multiply.

    Args:
        form: The whole matrix.
        columns: Places of columns, in the order of storage, which is not always that of the input.

    Shapes:
        features: `[len(columns)]` int64; None where they are those of `columns`
    """
    if isinstance(form, SplitWeight):
        if any(isinstance(part, GroupQuantizedWeight) and part.input_order is not None for part in form.parts):
            form = DenseWeight(form.dequantize())
        else:
            return SplitWeight(tuple(_columns(part, columns) for part in form.parts)), None
    order = form.input_order if isinstance(form, GroupQuantizedWeight) else None
    taken = _columns(form, columns)
    return taken, None if order is None else order[columns.start : columns.stop].clone()


def _rows(form: UnsplitWeight, rows: torch.Tensor) -> UnsplitWeight:
    if isinstance(form, DenseWeight):
        return DenseWeight(form.weight[rows.to(form.weight.device)])
    rows = rows.to(form.values.device)
    if isinstance(form, GroupQuantizedWeight):
        offsets = None if form.offsets is None else form.offsets[rows]
        return replace(form, values=form.values[rows], scales=_indexed(form.scales, rows), offsets=offsets)
    scales = form.scales
    if form.has_row_scales:
        scales = scales if len(scales) == 1 else scales[rows]
    else:
        blocks = rows // SCALE_BLOCK
        firsts = blocks[::SCALE_BLOCK]
        if not torch.equal(firsts.repeat_interleave(SCALE_BLOCK)[: len(rows)], blocks):
            return DenseWeight(form.dequantize()[rows])
        scales = scales[firsts]
    return replace(form, values=_indexed(form.values, rows), scales=scales)


def _columns(form: UnsplitWeight, columns: range) -> UnsplitWeight:
    if isinstance(form, DenseWeight):
        return DenseWeight(form.weight[:, columns.start : columns.stop].contiguous())
    if isinstance(form, ScaledWeight):
        if form.has_row_scales:
            return replace(form, values=form.values[:, columns.start : columns.stop].contiguous())
        if columns.start % SCALE_BLOCK or (columns.stop % SCALE_BLOCK and columns.stop != form.shape[1]):
            return DenseWeight(form.dequantize()[:, columns.start : columns.stop].contiguous())
        blocks = slice(columns.start // SCALE_BLOCK, -(-columns.stop // SCALE_BLOCK))
        values = form.values[:, columns.start : columns.stop].contiguous()
        return replace(form, values=values, scales=form.scales[:, blocks].contiguous())
    return _columns_of_groups(form, columns)


def _columns_of_groups(form: GroupQuantizedWeight, columns: range) -> UnsplitWeight:
    """Take columns; where they begin or end within a group, groups are divided into smaller ones of the same scales."""
    ends = [end for end in (columns.start, columns.stop) if end != form.shape[1]]
    size, per_byte = math.gcd(form.group_size, *ends), form.number.per_byte
    if size % per_byte:
        order = torch.arange(form.shape[1], device=form.values.device) if form.input_order is None else form.input_order
        stored = form.dequantize().index_select(1, order)
        return DenseWeight(stored[:, columns.start : columns.stop].contiguous())
    groups = torch.arange(columns.start // size, -(-columns.stop // size), device=form.values.device)
    groups = groups * size // form.group_size
    values = form.values[:, columns.start // per_byte : columns.stop // per_byte].contiguous()
    scales = form.scales.view(torch.uint8) if form.scales.itemsize == 1 else form.scales
    offsets = None if form.offsets is None else form.offsets[:, groups]
    scales = scales[:, groups].view(form.scales.dtype)
    return replace(form, values=values, group_size=size, scales=scales, offsets=offsets, input_order=None)


def _indexed(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # Indexing is not defined for float8 on every device: its bytes are.
    return matrix.view(torch.int8)[rows].view(matrix.dtype) if matrix.itemsize == 1 else matrix[rows]
