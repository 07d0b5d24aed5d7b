"""Some rows or columns: the same numbers as in the whole, in the same form where what shares scales stays together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear.forms import (
    FLOAT4,
    INT4,
    SCALE_BLOCK,
    DenseWeight,
    GroupQuantizedWeight,
    ScaledWeight,
    WeightForm,
    concatenate,
    reorder_columns,
    reorder_rows,
    scale_rows,
    select_columns,
    select_rows,
)

ROWS, COLUMNS = 2 * SCALE_BLOCK, 24


def random_order(generator: torch.Generator, *, within: int) -> torch.Tensor:
    """Return an order whose rows stay in their stretch of `within` rows."""
    parts = [torch.randperm(within, generator=generator) + first for first in range(0, ROWS, within)]
    return torch.cat(parts)


def forms(generator: torch.Generator) -> dict[str, WeightForm]:
    dense = DenseWeight(torch.randn(ROWS, COLUMNS, generator=generator))
    codes = torch.randint(256, (ROWS, COLUMNS // 2), generator=generator, dtype=torch.uint8)
    scales, offsets = (torch.randn(ROWS, 3, generator=generator) for _ in range(2))
    bytes_ = torch.randint(-100, 100, (ROWS, COLUMNS), generator=generator, dtype=torch.int8)
    float8 = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    half = ROWS // 2
    return {
        "dense": dense,
        "groups": GroupQuantizedWeight(codes, INT4, 8, scales, offsets),
        "microscaled": GroupQuantizedWeight(codes, FLOAT4, 8, scales.abs().to(torch.float8_e8m0fnu), None),
        "rows": ScaledWeight(bytes_, torch.rand(ROWS, 1, generator=generator), "dynamic"),
        "tensor": ScaledWeight(float8, torch.rand(1, 1, generator=generator)),
        "blocks": ScaledWeight(float8, torch.rand(2, 1, generator=generator)),
        "parts": concatenate([ScaledWeight(bytes_[:half], torch.ones(half, 1)), DenseWeight(dense.weight[half:])]),
    }


@pytest.mark.parametrize("within", [SCALE_BLOCK, ROWS])
@pytest.mark.parametrize("name", ["dense", "groups", "microscaled", "rows", "tensor", "blocks", "parts"])
def test_rows_of_every_form_are_in_the_order_that_was_asked_for(name: str, within: int) -> None:
    generator = torch.Generator().manual_seed(within)
    form, order = forms(generator)[name], random_order(generator, within=within)
    moved = reorder_rows(form, order)
    assert torch.equal(moved.dequantize(), form.dequantize()[order])
    stays = within == SCALE_BLOCK or name not in ("blocks", "parts")
    assert isinstance(moved, type(form)) == stays


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


NAMES = ["dense", "groups", "microscaled", "rows", "tensor", "blocks", "parts"]


@pytest.mark.parametrize("is_even", [True, False], ids=["even within blocks", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_form_are_multiplied(name: str, is_even: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    form, factors = forms(generator)[name], torch.rand(ROWS, generator=generator) + 0.5
    if is_even:
        factors = factors[::SCALE_BLOCK].repeat_interleave(SCALE_BLOCK)
    scaled = scale_rows(form, factors)
    torch.testing.assert_close(scaled.dequantize(), form.dequantize() * factors[:, None], rtol=1e-6, atol=1e-6)
    assert isinstance(scaled, type(form)) == (is_even or name != "blocks")


def test_numbers_of_16_bits_stay_of_16_bits() -> None:
    form = DenseWeight(torch.ones(2, 3, dtype=torch.bfloat16))
    assert scale_rows(form, torch.tensor([1.0, 0.3])).dequantize()[1, 0] == torch.tensor(0.3).bfloat16()
