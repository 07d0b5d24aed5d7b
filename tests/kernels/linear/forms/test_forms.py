"""The plain formula of every form against arithmetic on single numbers; concatenation against stacking.

Some rows or columns: the same numbers as in the whole, in the same form where what shares scales stays together.
"""

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
    SplitWeight,
    UnsplitWeight,
    WeightForm,
    concatenate,
    integers,
    reorder_columns,
    reorder_rows,
    scale_rows,
    select_columns,
    select_rows,
)


def groups(
    rows: int, columns: int, bits: int, group_size: int, order: torch.Tensor | None = None, seed: int = 0
) -> GroupQuantizedWeight:
    generator = torch.Generator().manual_seed(seed + rows)
    values = torch.randint(256, (rows, columns * bits // 8), generator=generator).to(torch.uint8)
    scales, offsets = (torch.randn(rows, -(-columns // group_size), generator=generator) for _ in range(2))
    return GroupQuantizedWeight(values, integers(bits), group_size, scales, offsets, order)


def scaled(rows: int, columns: int, scales: tuple[int, int], dtype: torch.dtype = torch.int8) -> ScaledWeight:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-100, 100, (rows, columns), generator=generator).to(dtype)
    return ScaledWeight(values, torch.randn(scales, generator=generator), "dynamic")


def group_number(form: GroupQuantizedWeight, row: int, column: int) -> float:
    """The number that a stored column of a row stands for."""
    if form.number.bits == 8:
        q = int(form.values[row, column])
    else:
        q = int(form.values[row, column // 2]) // (16 if column % 2 else 1) % 16
    group = column // form.group_size
    return float(form.scales[row, group].double() * q + form.offsets[row, group].double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(1, 2, 2), (3, 10, 4), (5, 64, 64), (7, 34, 32), (2, 6, 8)]
)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_groups_equal_scale_times_value_plus_offset(
    bits: int, rows: int, columns: int, group_size: int, is_ordered: bool
) -> None:
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1)) if is_ordered else None
    form = groups(rows, columns, bits, group_size, order)
    weight = form.dequantize()
    assert weight.dtype is torch.float32
    assert tuple(weight.shape) == form.shape == (rows, columns)
    for row in range(rows):
        for column in range(columns):
            feature = column if order is None else int(order[column])
            assert float(weight[row, feature]) == pytest.approx(group_number(form, row, column), rel=1e-5, abs=1e-5)


def test_group_of_scale_zero_is_its_offset() -> None:
    form = groups(4, 8, 4, 4)
    form.scales.zero_()
    form.offsets[:, 0] = 0
    weight = form.dequantize()
    assert (weight[:, :4] == 0).all()
    assert torch.equal(weight[:, 4:], form.offsets[:, 1:].expand(-1, 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("rows", "columns", "scales"),
    [(3, 5, (1, 1)), (3, 5, (3, 1)), (128, 3, (1, 1)), (129, 257, (2, 3)), (300, 100, (3, 1)), (1, 130, (1, 2))],
)
def test_scales_of_tensors_rows_and_blocks(
    dtype: torch.dtype, rows: int, columns: int, scales: tuple[int, int]
) -> None:
    form = scaled(rows, columns, scales, dtype)
    weight = form.dequantize()
    assert weight.dtype is torch.float32
    for row in {0, rows // 2, rows - 1}:
        for column in {0, columns // 2, columns - 1}:
            i = 0 if scales[0] == 1 else row if scales[0] == rows else row // 128
            scale = form.scales[i, 0 if scales[1] == 1 else column // 128]
            assert weight[row, column] == form.values[row, column].float() * scale


def test_num_bytes_counts_what_describes_the_values() -> None:
    assert DenseWeight(torch.zeros(3, 4, dtype=torch.bfloat16)).num_bytes == 24
    assert groups(3, 16, 4, 8, torch.arange(16)).num_bytes == 3 * 8 + 2 * 3 * 2 * 4 + 16 * 8
    assert scaled(3, 16, (3, 1)).num_bytes == 3 * 16 + 3 * 4
    split = concatenate([groups(3, 16, 4, 8), scaled(3, 16, (3, 1))])
    assert split.num_bytes == 3 * 8 + 2 * 3 * 2 * 4 + 3 * 16 + 3 * 4


ORDER = torch.tensor([3, 1, 0, 2, *range(4, 16)])
LIKE: dict[str, list[UnsplitWeight]] = {
    "dense": [DenseWeight(torch.randn(3, 16)), DenseWeight(torch.randn(5, 16))],
    "four bits": [groups(3, 16, 4, 8), groups(5, 16, 4, 8), groups(1, 16, 4, 8)],
    "eight bits": [groups(3, 16, 8, 8), groups(5, 16, 8, 8)],
    "one order": [groups(3, 16, 4, 8, ORDER), groups(5, 16, 4, 8, ORDER.clone())],
    "row scales": [scaled(3, 16, (3, 1)), scaled(5, 16, (5, 1))],
    "tensor scales": [scaled(3, 16, (1, 1)), scaled(5, 16, (1, 1)), scaled(2, 16, (1, 1))],
    "rows and tensor": [scaled(3, 16, (3, 1)), scaled(5, 16, (1, 1))],
    "float8": [scaled(3, 16, (1, 1), torch.float8_e4m3fn), scaled(5, 16, (5, 1), torch.float8_e4m3fn)],
    "whole blocks": [scaled(256, 200, (2, 2)), scaled(128, 200, (1, 2)), scaled(130, 200, (2, 2))],
}
UNLIKE: dict[str, list[UnsplitWeight]] = {
    "kinds": [DenseWeight(torch.randn(3, 16)), groups(3, 16, 4, 8), scaled(3, 16, (3, 1))],
    "types": [DenseWeight(torch.randn(3, 16)), DenseWeight(torch.randn(3, 16).half())],
    "bits": [groups(3, 16, 4, 8), groups(3, 16, 8, 8)],
    "groups": [groups(3, 16, 4, 8), groups(3, 16, 4, 16)],
    "orders": [groups(3, 16, 4, 8, ORDER), groups(3, 16, 4, 8, ORDER.flip(0)), groups(3, 16, 4, 8)],
    "values": [scaled(3, 16, (3, 1)), scaled(3, 16, (3, 1), torch.float8_e4m3fn)],
    "inputs": [scaled(3, 16, (3, 1)), ScaledWeight(torch.ones(3, 16).to(torch.int8), torch.ones(3, 1))],
    "cut blocks": [scaled(130, 200, (2, 2)), scaled(128, 200, (1, 2))],
    "blocks and rows": [scaled(256, 200, (2, 2)), scaled(128, 200, (128, 1))],
}


@pytest.mark.parametrize("name", LIKE)
def test_like_forms_become_one(name: str) -> None:
    whole = concatenate(LIKE[name])
    assert type(whole) is type(LIKE[name][0])
    assert torch.equal(whole.dequantize(), torch.cat([form.dequantize() for form in LIKE[name]]))


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_forms_stay_apart(name: str) -> None:
    whole = concatenate(UNLIKE[name])
    assert isinstance(whole, SplitWeight)
    assert len(whole.parts) == len(UNLIKE[name])
    assert whole.shape == (sum(form.shape[0] for form in UNLIKE[name]), UNLIKE[name][0].shape[1])
    assert torch.equal(whole.dequantize(), torch.cat([form.dequantize() for form in UNLIKE[name]]))


def test_static_scales_join_only_when_they_are_one() -> None:
    def static(scale: float) -> ScaledWeight:
        return ScaledWeight(torch.ones(2, 8).to(torch.int8), torch.ones(1, 1), "static", torch.tensor(scale))

    assert isinstance(concatenate([static(0.5), static(0.5)]), ScaledWeight)
    assert isinstance(concatenate([static(0.5), static(0.25)]), SplitWeight)


def test_neighbours_join_within_a_split() -> None:
    parts = [groups(3, 16, 4, 8), groups(2, 16, 4, 8), DenseWeight(torch.randn(4, 16))]
    whole = concatenate([concatenate(parts), DenseWeight(torch.randn(1, 16))])
    assert isinstance(whole, SplitWeight)
    assert [part.shape for part in whole.parts] == [(5, 16), (5, 16)]


def test_forms_of_other_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input features \[16, 8\]"):
        concatenate([groups(3, 16, 4, 8), groups(3, 8, 4, 8)])
    with pytest.raises(ValueError, match="input features"):
        concatenate([])


@pytest.mark.parametrize("form", [*(forms[0] for forms in LIKE.values()), concatenate(UNLIKE["kinds"])])
def test_form_on_another_device_keeps_its_shape(form: UnsplitWeight) -> None:
    moved = form.to(torch.device("meta"))
    assert moved.shape == form.shape
    assert moved.num_bytes == form.num_bytes


NAMES = ["dense", "groups", "microscaled", "rows", "tensor", "blocks", "parts"]
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
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_form_are_in_the_order_that_was_asked_for(name: str, within: int) -> None:
    generator = torch.Generator().manual_seed(within)
    form, order = forms(generator)[name], random_order(generator, within=within)
    moved = reorder_rows(form, order)
    assert torch.equal(moved.dequantize(), form.dequantize()[order])
    stays = within == SCALE_BLOCK or name not in ("blocks", "parts")
    assert isinstance(moved, type(form)) == stays


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


@pytest.mark.parametrize("name", NAMES)
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
