"""Layer normalisation against its formula, and which normalisation is chosen."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.layers.norms import LayerNorm, NormWeights, RMSNorm, make_norm

SIZE = 37
EPS = 1e-3


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.7


def by_formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x, mean = x.double(), x.double().mean(1, keepdim=True)
    variance = ((x - mean) ** 2).mean(1, keepdim=True)
    return (x - mean) / (variance + EPS).sqrt() * weight.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normalised_as_the_formula_says(dtype: torch.dtype, weight_dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = numbers(5, SIZE, seed=1).to(dtype), numbers(SIZE, seed=2).to(weight_dtype)
    bias = numbers(SIZE, seed=3).to(dtype) if has_bias else None
    result = LayerNorm(weight, bias, EPS)(x)
    assert result.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(result.double(), by_formula(x, weight, bias), rtol=tolerance, atol=tolerance)


def test_a_sum_is_normalised_and_kept() -> None:
    x, stream, weight = numbers(3, SIZE, seed=4), numbers(3, SIZE, seed=5), numbers(SIZE, seed=6)
    whole = x + stream
    result = LayerNorm(weight, None, EPS).add(x, stream)
    assert torch.equal(stream, whole)
    torch.testing.assert_close(result.double(), by_formula(whole, weight, None), rtol=1e-5, atol=1e-5)


def test_the_weights_say_which_normalisation_it_is() -> None:
    weight = torch.ones(SIZE)
    assert isinstance(make_norm(NormWeights(weight, EPS)), RMSNorm)
    assert isinstance(make_norm(NormWeights(weight, EPS, is_centered=True)), LayerNorm)
    with pytest.raises(AssertionError, match="a bias"):
        make_norm(NormWeights(weight, EPS, bias=weight))


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rows_are_scaled_to_the_weight_and_eps_bounds_tiny_ones() -> None:
    cases = (torch.randn(5, 33) * 10, torch.rand(33), 1e-5, 1e-5), (torch.full((1, 8), 1e-4), torch.ones(8), 1e-2, 1e-7)
    for x, weight, eps, tolerance in cases:
        torch.testing.assert_close(RMSNorm(weight, eps)(x).double(), exact(x, weight, eps), atol=tolerance, rtol=0)


def test_large_half_precision_rows_do_not_overflow() -> None:
    result = RMSNorm(torch.ones(64, dtype=torch.float16), 1e-6)(torch.full((2, 64), 6e4, dtype=torch.float16))
    assert torch.equal(result, torch.ones_like(result))


def test_weights_may_be_more_precise_than_rows() -> None:
    x, weight = torch.randn(5, 33).bfloat16(), 1 + torch.randn(33) * 1e-3
    result = RMSNorm(weight, 1e-5)(x)
    assert torch.equal(result, exact(x, weight, 1e-5).bfloat16())


def test_add_updates_the_residual_in_place() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    total = x + residual
    result = RMSNorm(weight, 1e-5).add(x, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(result.double(), exact(total, weight, 1e-5), atol=1e-6, rtol=0)
