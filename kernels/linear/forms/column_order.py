"""A matrix whose columns are in another order, in the same form where that can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear.forms.dense import DenseWeight
from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.split import WeightForm


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
        values=_moved(form.values, groups, form.group_size // form.number.per_byte),
        scales=scales[:, groups].view(form.scales.dtype),
        offsets=None if form.offsets is None else form.offsets[:, groups],
    )


def _whole_groups(order: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """Return the order of groups, `[num_groups]`; None where the columns of one do not stay as they are."""
    if len(order) % group_size:
        return None
    parts = order.view(-1, group_size)
    together = parts[:, :1] + torch.arange(group_size)
    is_whole = torch.equal(parts, together) and not (parts[:, 0] % group_size).any()
    return parts[:, 0] // group_size if is_whole else None


def _moved(values: torch.Tensor, groups: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return values.view(len(values), -1, num_bytes)[:, groups].flatten(1)
