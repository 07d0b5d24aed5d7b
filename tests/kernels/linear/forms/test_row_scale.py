from __future__ import annotations

import pytest
import torch

from kernels.linear.forms import SCALE_BLOCK, DenseWeight, scale_rows
from tests.kernels.linear.forms.test_rows_and_columns import ROWS, forms

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
