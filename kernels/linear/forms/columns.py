"""The columns of a matrix chosen, or in another order, in the same form where that can be.

Where columns that share scales are taken apart, groups along the input become smaller, and other matrices are made
dense, in float32: that costs memory, never accuracy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import DenseWeight, SplitWeight, UnsplitWeight, WeightForm


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
