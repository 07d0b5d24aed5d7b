"""Rows or columns of a matrix chosen, in another order, or multiplied by numbers, in the same form where that can be.

Where rows that share scales are taken apart, or get different factors, the matrix is made dense, in float32: that costs
memory, never accuracy. The same holds for columns, except that groups along the input become smaller where they can.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import DenseWeight, SplitWeight, UnsplitWeight, WeightForm, concatenate


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


def reorder_rows(form: WeightForm, order: torch.Tensor) -> WeightForm:
    """Return the matrix whose row `i` is row `order[i]` of `form`.

    Rows may move within a part of a `SplitWeight`, and whole blocks of rows that share scales may move.

    Shapes:
        order: `[out_features]` int64, each row once
    """
    if isinstance(form, SplitWeight) and not _stay_in_parts(form, order):
        form = DenseWeight(form.dequantize())
    return select_rows(form, order)


def _stay_in_parts(form: SplitWeight, order: torch.Tensor) -> bool:
    sizes = torch.tensor([part.shape[0] for part in form.parts])
    places = torch.arange(len(sizes)).repeat_interleave(sizes)
    return torch.equal(places[order.cpu()], places)


def scale_rows(form: WeightForm, factors: torch.Tensor) -> WeightForm:
    """Return the matrix whose row `i` is row `i` of `form` times `factors[i]`.

    Scales of quantized matrices take the factors. Where rows share scales and have different factors, the matrix is
    made dense, in float32: that costs memory, never accuracy. Dense numbers are rounded once more.

    Shapes:
        factors: `[out_features]` float32
    """
    if not isinstance(form, SplitWeight):
        return _scale(form, factors)
    parts = factors.split_with_sizes([part.shape[0] for part in form.parts])
    return SplitWeight(tuple(_scale(part, own) for part, own in zip(form.parts, parts, strict=True)))


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


def _indexed(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # Indexing is not defined for float8 on every device: its bytes are.
    return matrix.view(torch.int8)[rows].view(matrix.dtype) if matrix.itemsize == 1 else matrix[rows]


def _scale(form: UnsplitWeight, factors: torch.Tensor) -> UnsplitWeight:
    if isinstance(form, DenseWeight):
        column = factors.to(form.weight.device)[:, None]
        return DenseWeight((form.weight.float() * column).to(form.weight.dtype))
    column = factors.to(form.values.device)[:, None]
    if isinstance(form, GroupQuantizedWeight):
        offsets = None if form.offsets is None else form.offsets * column
        return replace(form, scales=form.scales.float() * column, offsets=offsets)
    if form.has_row_scales:
        return replace(form, scales=form.scales * column)
    of_blocks = column[::SCALE_BLOCK]
    if not torch.equal(of_blocks.repeat_interleave(SCALE_BLOCK, 0)[: len(column)], column):
        return DenseWeight(form.dequantize() * column)
    return ScaledWeight(form.values, form.scales * of_blocks, form.activation, form.activation_scale)


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


def reorder_columns(form: WeightForm, order: torch.Tensor) -> WeightForm:
    """Return the matrix whose column `i` is column `order[i]` of `form`.

    Whole groups that share scales move as they are. Where an order takes groups apart, codes stay where they are and
    inputs are gathered; forms that cannot do so are made dense, in float32: that costs memory, never accuracy.

    Shapes:
        order: `[in_features]` int64, each column once
    """
    if isinstance(form, DenseWeight):
        return DenseWeight(form.weight[:, order.to(form.weight.device)])
    if not isinstance(form, GroupQuantizedWeight) or form.input_order is not None:
        dense = form.dequantize()
        return DenseWeight(dense[:, order.to(dense.device)])
    groups = _whole_groups(order, form.group_size)
    if groups is None:
        return replace(form, input_order=torch.argsort(order).to(form.values.device))
    groups = groups.to(form.values.device)
    scales = form.scales.view(torch.uint8) if form.scales.itemsize == 1 else form.scales
    return replace(
        form,
        values=form.values.view(len(form.values), -1, form.group_size // form.number.per_byte)[:, groups].flatten(1),
        scales=scales[:, groups].view(form.scales.dtype),
        offsets=None if form.offsets is None else form.offsets[:, groups],
    )


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


def _whole_groups(order: torch.Tensor, group_size: int) -> torch.Tensor | None:
    if len(order) % group_size:
        return None
    parts = order.view(-1, group_size)
    together = parts[:, :1] + torch.arange(group_size)
    is_whole = torch.equal(parts, together) and not (parts[:, 0] % group_size).any()
    return parts[:, 0] // group_size if is_whole else None
