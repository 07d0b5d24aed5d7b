"""Some rows or columns: the same numbers as in the whole, in the same form where what shares scales stays together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear.forms import (
    SCALE_BLOCK,
    DenseWeight,
    GroupQuantizedWeight,
    ScaledWeight,
    WeightForm,
    select_columns,
    select_rows,
)
from tests.kernels.linear.forms.test_row_order import COLUMNS, forms

NAMES = ["dense", "groups", "microscaled", "rows", "tensor", "blocks", "parts"]


@pytest.fixture
def every() -> dict[str, WeightForm]:
    return forms(torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (5, 6, 7), (9, 9, 1), (2, 11, 12)])
def test_rows_of_every_form(name: str, chosen: tuple[int, ...], every: dict[str, WeightForm]) -> None:
    form, rows = every[name], torch.tensor(chosen)
    assert torch.equal(select_rows(form, rows).dequantize(), form.dequantize()[rows])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [range(8), range(8, COLUMNS), range(12, COLUMNS), range(4, 8), range(3, 5)])
def test_columns_of_every_form(name: str, columns: range, every: dict[str, WeightForm]) -> None:
    form = every[name]
    taken, features = select_columns(form, columns)
    assert features is None
    assert torch.equal(taken.dequantize(), form.dequantize()[:, columns.start : columns.stop])


@pytest.mark.parametrize(("columns", "size"), [(range(8, 16), 8), (range(12, 24), 4), (range(6), 2)])
def test_groups_that_are_taken_apart_become_smaller(columns: range, size: int, every: dict[str, WeightForm]) -> None:
    form = every["groups"]
    assert isinstance(form, GroupQuantizedWeight)
    taken, _ = select_columns(form, columns)
    assert isinstance(taken, GroupQuantizedWeight)
    assert taken.group_size == size


def test_columns_whose_order_is_not_the_inputs_say_what_they_multiply(every: dict[str, WeightForm]) -> None:
    form = every["groups"]
    assert isinstance(form, GroupQuantizedWeight)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    form = replace(form, input_order=order)
    halves = [select_columns(form, columns) for columns in (range(8), range(8, COLUMNS))]
    whole = torch.empty(form.shape)
    for taken, features in halves:
        assert isinstance(taken, GroupQuantizedWeight)
        assert features is not None
        whole[:, features] = taken.dequantize()
    assert torch.equal(whole, form.dequantize())


def test_blocks_stay_blocks_where_they_stay_together() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-127, 128, (3 * SCALE_BLOCK, 3 * SCALE_BLOCK), dtype=torch.int8, generator=generator)
    form = ScaledWeight(values, torch.rand(3, 3, generator=generator), "dynamic")
    rows = torch.cat((torch.arange(SCALE_BLOCK), torch.arange(2 * SCALE_BLOCK, 3 * SCALE_BLOCK)))
    taken = select_rows(form, rows)
    assert isinstance(taken, ScaledWeight)
    assert taken.activation == "dynamic"
    assert torch.equal(taken.dequantize(), form.dequantize()[rows])
    part, _ = select_columns(form, range(SCALE_BLOCK, 3 * SCALE_BLOCK))
    assert isinstance(part, ScaledWeight)
    assert torch.equal(part.dequantize(), form.dequantize()[:, SCALE_BLOCK:])
    apart = select_rows(form, rows[5:])
    assert isinstance(apart, DenseWeight)
    assert torch.equal(apart.dequantize(), form.dequantize()[rows[5:]])
