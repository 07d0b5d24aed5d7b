"""A matrix whose rows are in another order, in the same form where that can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear.forms.dense import DenseWeight
from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import SplitWeight, UnsplitWeight, WeightForm


def reorder_rows(form: WeightForm, order: torch.Tensor) -> WeightForm:
    """Return the matrix whose row `i` is row `order[i]` of `form`.

    Rows may move within a part of a `SplitWeight`, and within a block of rows that shares scales. Where an order moves
    them further, the matrix is made dense, in float32: that costs memory, never accuracy.

    Shapes:
        order: `[out_features]` int64, each row once
    """
    if not isinstance(form, SplitWeight):
        return _reorder(form, order)
    parts: list[UnsplitWeight] = []
    first = 0
    for part in form.parts:
        rows = order[first : first + part.shape[0]] - first
        if rows.min() < 0 or rows.max() >= part.shape[0]:
            return _reorder(DenseWeight(form.dequantize()), order)
        parts.append(_reorder(part, rows))
        first += part.shape[0]
    return SplitWeight(tuple(parts))


def _reorder(form: UnsplitWeight, order: torch.Tensor) -> UnsplitWeight:
    if isinstance(form, DenseWeight):
        return DenseWeight(form.weight[order.to(form.weight.device)])
    order = order.to(form.values.device)
    if isinstance(form, GroupQuantizedWeight):
        offsets = None if form.offsets is None else form.offsets[order]
        return replace(form, values=form.values[order], scales=_rows(form.scales, order), offsets=offsets)
    scales = form.scales
    if scales.shape == (form.shape[0], 1):
        scales = scales[order]
    elif not form.has_row_scales and not torch.equal(order // SCALE_BLOCK, torch.arange(len(order)) // SCALE_BLOCK):
        return DenseWeight(form.dequantize()[order])
    return ScaledWeight(_rows(form.values, order), scales, form.activation, form.activation_scale)


def _rows(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    # Indexing is not defined for float8 on every device: its bytes are.
    return matrix.view(torch.int8)[order].view(matrix.dtype) if matrix.itemsize == 1 else matrix[order]
