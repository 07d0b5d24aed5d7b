from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.quantize.grid import fit_grid, float8_rows, int8_rows, round_to_nearest


def weights(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(12, 128, generator=generator)
    if kind == "outliers":
        weight[::3, 5] = 1e4
    elif kind == "tiny":
        weight *= 1e-6
    elif kind == "all positive":
        weight = weight.abs() + 1
    elif kind == "zero groups":
        weight[:, 32:64] = 0
    return weight


KINDS = ("normal", "outliers", "tiny", "all positive", "zero groups")


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_errs_by_half_a_level_at_most_inside_the_grid(kind: str) -> None:
    weight = weights(kind)

    matrix = round_to_nearest(weight, 4, 32)

    scales = matrix.grid.scales.repeat_interleave(32, 1)
    # The grid ends half a level before its largest weight, and the scale is off by half a step of float16, which the
    # outermost level multiplies by 8.
    limit = scales * 0.51 + 8 * 2**-25
    assert ((matrix.dequantize() - weight).abs() <= limit).all()
    assert matrix.values.max() <= 15


def test_zero_groups_stay_zero() -> None:
    matrix = round_to_nearest(weights("zero groups"), 4, 32)

    assert not matrix.dequantize()[:, 32:64].any()


def test_scales_are_exactly_what_a_checkpoint_can_store() -> None:
    for kind in KINDS:
        scales = fit_grid(weights(kind), 4, 32).scales
        assert torch.equal(scales, scales.half().float())
        assert (scales > 0).all()


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_levels_of_the_grid_are_kept(rows: int, groups: int, bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    grid = fit_grid(torch.randn(rows, groups * 32), bits, 32)
    values = torch.randint(0, 2**bits, (rows, groups * 32), dtype=torch.uint8)

    assert torch.equal(grid.round(grid.level(values)), values)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_keep_their_largest_magnitude(kind: str) -> None:
    weight = weights(kind)

    for rows in (int8_rows(weight), float8_rows(weight)):
        torch.testing.assert_close(rows.dequantize().abs().amax(1), weight.abs().amax(1))


def test_a_row_of_zeros_is_kept() -> None:
    for rows in (int8_rows(torch.zeros(2, 8)), float8_rows(torch.zeros(2, 8))):
        assert not rows.dequantize().any()
        assert rows.scales.isfinite().all()


def test_int8_rows_err_by_half_a_level_at_most() -> None:
    weight = weights("normal")
    rows = int8_rows(weight)

    assert ((rows.dequantize() - weight).abs() <= rows.scales * 0.5001).all()


def test_split_parts_are_the_rows_of_the_whole() -> None:
    weight = weights("normal")
    for whole in (round_to_nearest(weight, 4, 32), int8_rows(weight)):
        parts = [part.dequantize() for part in whole.split([5, 3, 4])]
        assert torch.equal(torch.cat(parts), whole.dequantize())
