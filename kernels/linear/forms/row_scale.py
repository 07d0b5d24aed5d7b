"""A matrix whose rows are multiplied by numbers, in the same form where that can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear.forms.dense import DenseWeight
from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import SplitWeight, UnsplitWeight, WeightForm


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
