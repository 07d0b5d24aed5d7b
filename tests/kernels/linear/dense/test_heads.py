"""Products of heads against torch in float64, and rows alone against rows among others."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.dense.heads import HeadLinear, KernelHeadLinear, PlainHeadLinear, make_head_linear
from tests.kernels.poisoned_memory import poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def multiply(linear: HeadLinear, x: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Multiply into a part of wider memory, and see that the rest of it stays as it is."""
    wide = torch.full((x.shape[0], x.shape[1] + 1, num_outputs + 6), torch.nan, dtype=x.dtype)
    with poisoned_memory():
        result = linear(x, wide[:, :-1, :num_outputs])
    assert wide[:, -1].isnan().all()
    assert wide[..., num_outputs:].isnan().all()
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(4, 12, 24), (3, 96, 130), (5, 2, 64)])
def test_products_equal_the_definition(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(heads, inputs, outputs, generator=generator) * inputs**-0.5).to(dtype)
    x = torch.randn(101, heads, inputs + 8, generator=generator).to(dtype)[..., :inputs]
    linear = make_head_linear(weight)
    assert isinstance(linear, KernelHeadLinear)
    result = multiply(linear, x, outputs)
    expected = torch.einsum("nhi,hio->nho", x.double(), weight.double())
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    if dtype is torch.float32:
        torch.testing.assert_close(multiply(PlainHeadLinear(weight), x, outputs), result, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    linear, x = make_head_linear(torch.randn(3, 12, 70).to(dtype)), torch.randn(34, 3, 12).to(dtype)
    alone = torch.cat([multiply(linear, row[None], 70) for row in x])
    num_threads = torch.get_num_threads()
    for num_rows in (2, 3, 7, 16, 33):
        torch.set_num_threads(1 + num_rows % 2)
        try:
            assert torch.equal(multiply(linear, x[1 : num_rows + 1], 70), alone[1 : num_rows + 1])
        finally:
            torch.set_num_threads(num_threads)
