from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.linear.rounding.triton_kernel import quantize_tokens_triton
from kernels.rms_norm import rms_norm
from kernels.rms_norm.dispatch import rms_norm_reference
from kernels.rms_norm.triton_kernel import can_run, rms_norm_rounded_triton, rms_norm_triton
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import ROUNDINGS, assert_close, assert_same_rounded

SIZES = [(1, 1), (5, 77), (13, 128), (3, 1000), (2, 5120), (1, 16384)]
GPU_SIZES = [*SIZES, (1000, 4096), (33, 8192), (70_000, 16)]


def check(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, num_rows, size, generator=generator).to(device, dtype)
    weight = torch.randn(size, generator=generator).to(device, dtype)
    expected_residual = residual.clone()
    expected = rms_norm_reference(x, weight, 1e-5, expected_residual)
    with poisoned_memory():
        plain = rms_norm_triton(x, weight, 1e-5, None)
        added = rms_norm_triton(x, weight, 1e-5, residual)
    assert_close(plain, rms_norm_reference(x, weight, 1e-5))
    assert_close(added, expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_rows_of_any_size_equal_reference(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(num_rows, size, dtype, device)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_rounded_rows_are_those_of_two_launches(
    num_rows: int, size: int, has_residual: bool, rounding: str, device: torch.device
) -> None:
    wanted, generator = ROUNDINGS[rounding], torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, num_rows, size, generator=generator).to(device, torch.float16)
    weight = torch.randn(size, generator=generator).to(device)
    residuals = (residual, residual.clone()) if has_residual else (None, None)
    expected = quantize_tokens_triton(rms_norm_triton(x, weight, 1e-5, residuals[0]), wanted)
    with poisoned_memory():
        actual = rms_norm_rounded_triton(x, weight, 1e-5, residuals[1], wanted)
    assert_same_rounded(actual, expected)
    if has_residual:
        assert torch.equal(residuals[0], residuals[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "size"), GPU_SIZES)
def test_bfloat16_rows_equal_reference(num_rows: int, size: int, device: torch.device) -> None:
    check(num_rows, size, torch.bfloat16, device)


def test_reference_equals_equation() -> None:
    x, weight = torch.randn(3, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    expected = x / (x.square().mean(dim=1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(rms_norm_reference(x, weight, 0.1), expected)


def test_strided_rows_equal_contiguous_rows(device: torch.device) -> None:
    wide = torch.full((4, 300), float("nan"), device=device)
    x, weight = torch.randn(4, 100, device=device), torch.randn(100, device=device)
    wide[:, 40:140] = x
    actual = rms_norm_triton(wide[:, 40:140], weight, 1e-6, None)
    assert torch.equal(actual, rms_norm_triton(x, weight, 1e-6, None))


def test_cpu_tensors_equal_reference() -> None:
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    expected = rms_norm_reference(x, weight, 1e-6, residual.clone())
    assert_close(rms_norm(x, weight, 1e-6, residual), expected)


def test_unsupported_rows_are_refused() -> None:
    assert not can_run(torch.empty(1, 32769))
    assert not can_run(torch.empty(8, 4).T)
    assert not can_run(torch.empty(1, 2, 4))
