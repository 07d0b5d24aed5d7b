from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.forms import SCALE_BLOCK, ScaledWeight
from kernels.linear.gpu_scaled import block_product, dispatch, matrix, scale_matrix, scaled_linear
from kernels.linear.gpu_scaled.block_product import is_right
from kernels.linear.rounding import InputRounding
from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

CPU = torch.device("cpu")
BLOCKS = "BlockWise1x128", "BlockWise128x128"


def spread(scales: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(SCALE_BLOCK, dim=1)


def cublas(a: torch.Tensor, b: torch.Tensor, sa: Any, recipe_a: Any, sb: Any, recipe_b: Any, **options: Any) -> Any:
    """Multiply by the formula; refuse arguments that cuBLAS would refuse."""
    if (recipe_a.name, recipe_b.name) != BLOCKS or len(a) % 4 or sa.stride() != (1, len(a)):
        raise RuntimeError("scales of inputs lie column by column")
    if sb.shape[0] % 4 or sb.stride() != (1, sb.shape[0]) or b.stride() != (1, b.shape[0]):
        raise RuntimeError("a weight has a multiple of four blocks along its input features")
    wide = b.t().float() * spread(sb.t()[:, : b.shape[0] // SCALE_BLOCK]).repeat_interleave(SCALE_BLOCK, dim=0)
    return ((a.float() * spread(sa)) @ wide.t()).to(options["output_dtype"])


def refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("only supported in CUDA for SM90")


def unscaled(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return (a.float() @ b.float()).bfloat16()


@pytest.mark.parametrize(("product", "expected"), [(cublas, True), (refused, False), (unscaled, False)])
def test_product_is_taken_where_it_is_right(product: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", product)
    assert is_right(CPU) == expected


@pytest.mark.parametrize("answer", [True, False])
def test_hopper_has_the_product_where_it_is_right(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_product, "is_right", lambda _: answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert block_product.has_block_product.__wrapped__(torch.device("cuda", 0)) is answer


def test_device_that_is_no_hopper_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_product, "is_right", lambda _: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for device in (CPU, torch.device("cuda", 3)):
        assert not block_product.has_block_product.__wrapped__(device)


@pytest.mark.parametrize("num_rows", [65, 68])
def test_prompts_are_multiplied_by_it(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    form = ScaledWeight(
        torch.randn(256, 640, generator=generator).to(torch.float8_e4m3fn),
        torch.rand(2, 5, generator=generator) + 0.5,
        "dynamic",
    )
    x = torch.randn(num_rows, 640, generator=generator).bfloat16()
    bias = torch.randn(256, generator=generator).bfloat16()
    called: list[tuple[int, ...]] = []

    def product(*tensors: Any, **named: Any) -> torch.Tensor:
        called.append(tensors[0].shape)
        return cublas(*tensors, **named)

    monkeypatch.setattr(F, "scaled_mm", product)
    monkeypatch.setattr(matrix, "can_multiply", lambda _: True)
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: Gpu(GpuGeneration.HOPPER, 132))
    result = scaled_linear(x, scale_matrix(form), bias)
    rows = quantize_tokens_triton(x, InputRounding(torch.float8_e4m3fn, has_blocks=True))
    expected = (rows.values.float() * spread(rows.scales))[:num_rows] @ form.dequantize().t() + bias.float()
    assert called == [(68, 640)]
    assert (result.float() - expected).norm() < 1e-2 * expected.norm()
