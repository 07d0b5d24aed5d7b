from __future__ import annotations

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
    reorder_rows,
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
