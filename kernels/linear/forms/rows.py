"""The rows of a matrix chosen, in another order, or multiplied by numbers, in the same form where that can be.

Where rows that share scales are taken apart, or get different factors, the matrix is made dense, in float32: that costs
memory, never accuracy.
"""

from __future__ import annotations

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
