"""Products of 8-bit inputs and weights against the references' rounding and float64 arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration, by_generation
from kernels.linear.forms import SCALE_BLOCK, ScaledWeight
from kernels.linear.gpu_scaled import block_product, dispatch, matrix, scale_matrix, scaled_linear
from kernels.linear.gpu_scaled.block_product import is_right
from kernels.linear.gpu_scaled.matrix import (
    SCALED_LINEAR,
    is_kernel_preferred,
    scaled_linear_launch,
    scaled_linear_splits,
)
from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton
from kernels.linear.product_launch import ProductLaunch
from kernels.linear.reference import quantize_tokens, round_inputs
from kernels.linear.rounding import InputRounding
from kernels.linear.rounding.triton_kernel import quantize_tokens_triton
from tests.kernels.compile_checks import CAPABILITIES, CompiledKernel, compile_launches, instructions_of
from tests.kernels.poisoned_memory import poisoned_memory

H200 = Gpu(GpuGeneration.HOPPER, 132)
SMALL = ProductLaunch(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=2)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Sums in float32; the result is rounded.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def random_rows(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of all sizes, in memory that is NaN beside them: zeros, tiny ones, one with an outlier."""
    generator = torch.Generator().manual_seed(size)
    padded = torch.full((num_rows, size + 3), float("nan"), dtype=dtype)
    rows = padded[:, :size].copy_(3 * torch.randn(num_rows, size, generator=generator))
    for index, factor in enumerate((0, 1e-3)):
        if index + 1 < num_rows:
            rows[index + 1] *= factor
    rows[-1, size // 2] = 1000
    return rows


def random_weight(dtype: torch.dtype, scales: tuple[int, int], rows: int, columns: int) -> ScaledWeight:
    """A matrix of either type."""
    generator = torch.Generator().manual_seed(rows)
    values = (torch.randn(rows, columns, generator=generator) * 40).clamp(-127, 127).to(dtype)
    return ScaledWeight(values, torch.rand(scales, generator=generator) + 0.1, "dynamic")


@pytest.mark.parametrize("size", [1, 77, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_static", [False, True])
def test_tokens_become_integers_as_in_the_reference(
    is_static: bool, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    x = random_rows(5, size, dtype)
    scale = torch.tensor(0.02) if is_static else None
    expected, expected_scales = quantize_tokens(x, scale)
    with poisoned_memory():
        rounding = InputRounding(INT8, None if scale is None else scale.to(device))
        rounded = quantize_tokens_triton(x.to(device), rounding)
    assert torch.equal(rounded.values.cpu(), expected)
    assert torch.equal(rounded.scales.cpu(), expected_scales.expand(5, 1))


@pytest.mark.parametrize("size", [1, 77, 300, 4096])
@pytest.mark.parametrize("kind", ["token", "static", "blocks"])
def test_tokens_become_float8_as_in_the_reference(kind: str, size: int, device: torch.device) -> None:
    x = random_rows(4, size)
    given = torch.tensor(0.5) if kind == "static" else None
    has_blocks = kind == "blocks"
    num_parts = -(-size // 128) if has_blocks else 1
    # Three rows of blocks, of no columns that matter: enough to tell that scales are those of blocks.
    activation = "dynamic" if given is None else "static"
    weight = ScaledWeight(
        torch.empty(300, size, dtype=FLOAT8), torch.ones(3 if has_blocks else 1, num_parts), activation, given
    )
    rounding = InputRounding(FLOAT8, None if given is None else given.to(device), has_blocks)
    rounded = quantize_tokens_triton(x.to(device), rounding)
    values, scales = rounded.values[: len(x)], rounded.scales[: len(x)]
    spread = scales.cpu().repeat_interleave(128 if has_blocks else size, dim=1)[:, :size]
    assert torch.equal(values.cpu().float() * spread, round_inputs(x, weight))


def check(
    weight: ScaledWeight, num_rows: int, num_splits: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Multiply twice: the second launch finds the counters as the first left them."""
    rows, columns = weight.values.shape
    x = random_rows(num_rows, columns).clamp(-50, 50)
    matrix = scale_matrix(weight.to(device))
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    has_blocks = not weight.has_row_scales
    rounded = quantize_tokens_triton(x.to(device), matrix.rounding)
    values, scales = rounded.values[:num_rows], rounded.scales[:num_rows]
    spread = scales.cpu().repeat_interleave(128 if has_blocks else columns, dim=1)[:, :columns]
    given = values.cpu().double() * spread.double()
    expected = given @ weight.dequantize().double().T + bias.double()
    config = SMALL if device.type == "cpu" else None
    for out_dtype in (dtype, torch.float32):
        with poisoned_memory():
            actual = scaled_linear_triton(values, scales, matrix, bias.to(device), out_dtype, H200, config, num_splits)
        assert actual.dtype is out_dtype
        assert (actual.cpu().double() - expected).norm() / expected.norm() < TOLERANCE[out_dtype]
    assert matrix.counters.count_nonzero() == 0


@pytest.mark.parametrize(("num_rows", "columns", "num_splits"), [(1, 384, 3), (5, 300, 1), (16, 130, 2), (17, 130, 1)])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(INT8, (1, 1)), (INT8, (150, 1)), (FLOAT8, (1, 1)), (FLOAT8, (150, 1)), (FLOAT8, (2, 0))],
    ids=str,
)
def test_product_equals_reference(
    dtype: torch.dtype, scales: tuple[int, int], num_rows: int, columns: int, num_splits: int, device: torch.device
) -> None:
    if scales[1] == 0:
        scales = (2, -(-columns // 128))
    check(random_weight(dtype, scales, 150, columns), num_rows, num_splits, device, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 65, 1000])
@pytest.mark.parametrize("shape", [(4096, 4096), (1003, 1032)], ids=str)
@pytest.mark.parametrize("dtype", [INT8, FLOAT8], ids=str)
def test_product_in_bfloat16_equals_reference(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, device: torch.device
) -> None:
    all_scales = [(1, 1), (shape[0], 1)]
    if dtype is FLOAT8:
        all_scales.append((-(-shape[0] // 128), -(-shape[1] // 128)))
    for scales in all_scales:
        weight = random_weight(dtype, scales, *shape)
        check(weight, num_rows, None, device, torch.bfloat16)
        matrix = scale_matrix(weight.to(device))
        x = random_rows(num_rows, shape[1], torch.bfloat16).to(device)
        whole = scaled_linear(x, matrix, to_float32=False).float()
        kernels = scaled_linear(x, matrix, to_float32=True)
        assert (whole - kernels).norm() < 8e-3 * kernels.norm()


def test_dispatched_layer_quantizes_and_multiplies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: H200)
    weight = random_weight(INT8, (70, 1), 70, 256)
    matrix = scale_matrix(weight.to(device))
    x = random_rows(3, 256, torch.float16) / 100
    values, scales = quantize_tokens(x)
    expected = values.double() @ weight.values.double().T * scales.double() * weight.scales.double().T
    actual = scaled_linear(x.to(device), matrix, to_float32=True).cpu()
    assert (actual - expected).norm() < 1e-6 * expected.norm()
    assert scaled_linear(x.to(device), matrix).dtype is torch.float16
    assert scaled_linear(x[:0].to(device), matrix).shape == (0, 70)


@pytest.mark.parametrize("generation", GpuGeneration)
def test_table_has_an_entry_for_every_number_of_rows(generation: GpuGeneration) -> None:
    entries = by_generation(SCALED_LINEAR)[generation]
    assert list(entries) == sorted(entries)
    for num_rows in (1, 16, 17, 64, 1000):
        assert scaled_linear_launch(generation, num_rows).block_m >= min(num_rows, 128)
    assert is_kernel_preferred(generation, 64)
    assert not is_kernel_preferred(generation, 2048)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 64, 65])
def test_splits_fill_the_gpu(shape: tuple[int, int], num_rows: int) -> None:
    launch = scaled_linear_launch(GpuGeneration.HOPPER, num_rows)
    splits = scaled_linear_splits(launch, H200, num_rows, *shape)
    assert 1 <= splits <= (8 if num_rows <= 64 else 1)
    if num_rows == 1:
        assert splits * -(-shape[0] // launch.block_n) > 0.8 * H200.num_multiprocessors


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    output: Path = tmp_path_factory.mktemp("compiled") / "scaled"
    return compile_launches("tests.kernels.scaled_linear_launches", CAPABILITIES, output)


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_kernels_fit_the_gpu(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        kernel.check_fits()


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_eight_bits_go_into_the_matrix_instruction(compiled: list[CompiledKernel]) -> None:
    products = [kernel for kernel in compiled if kernel.kernel == "scaled_linear_kernel"]
    assert len(products) == 5 * len(CAPABILITIES) + 5 * (len(CAPABILITIES) - 1)
    for kernel in products:
        is_float = kernel.launch.startswith("fp8")
        # The compiler has no integers for Blackwell's own instruction.
        wanted = instructions_of(kernel.capability) if is_float or kernel.capability != 100 else {"mma"}
        assert kernel.matrix_instructions == wanted, kernel
        types = r"(e4m3\.e4m3|kind::f8f6f4)" if is_float else r"s8\.s8"
        assert kernel.count(rf"mma\S*\.{types}") > 0, kernel
        if not kernel.launch.startswith("odd"):
            assert kernel.count(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,") > 0, kernel


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_tokens_are_converted_by_instruction(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        # The compiler does it by other instructions before Hopper.
        if kernel.launch.startswith("quantize_fp8") and kernel.capability >= 90:
            assert kernel.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") > 0, kernel


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
