"""Columns in another order: the same numbers at other places, groups that stay whole in the same form."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.forms import DenseWeight, GroupQuantizedWeight, reorder_columns
from tests.kernels.linear.forms.test_row_order import COLUMNS, forms

GROUP = 8


@pytest.mark.parametrize("name", ["dense", "groups", "microscaled", "rows", "tensor", "blocks", "parts"])
@pytest.mark.parametrize("has_whole_groups", [True, False])
def test_columns_of_every_form_are_in_the_order_that_was_asked_for(name: str, has_whole_groups: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    form = forms(generator)[name]
    order = torch.tensor([16, 0, 8])[:, None] + torch.arange(GROUP)
    order = order.flatten() if has_whole_groups else torch.randperm(COLUMNS, generator=generator)
    moved = reorder_columns(form, order)
    assert torch.equal(moved.dequantize(), form.dequantize()[:, order])
    if isinstance(form, GroupQuantizedWeight):
        assert isinstance(moved, GroupQuantizedWeight)
        assert (moved.input_order is None) == has_whole_groups
        again = reorder_columns(moved, order)
        assert isinstance(again, GroupQuantizedWeight if has_whole_groups else DenseWeight)
        assert torch.equal(again.dequantize(), moved.dequantize()[:, order])
