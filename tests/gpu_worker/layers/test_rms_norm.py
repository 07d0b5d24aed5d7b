"""Normalisation against its formula."""

from __future__ import annotations

import torch

from gpu_worker.layers.rms_norm import RMSNorm


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rows_are_scaled_to_the_weight() -> None:
    x, weight = torch.randn(5, 33) * 10, torch.rand(33)
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), exact(x, weight, 1e-5), atol=1e-5, rtol=0)


def test_eps_bounds_tiny_rows() -> None:
    x, weight = torch.full((1, 8), 1e-4), torch.ones(8)
    torch.testing.assert_close(RMSNorm(weight, 1e-2)(x).double(), exact(x, weight, 1e-2), atol=1e-7, rtol=0)


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
