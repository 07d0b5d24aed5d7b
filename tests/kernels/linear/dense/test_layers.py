"""Every form of a linear layer against float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.linear import Linear
from kernels.linear.dense import cpu, keeps_half, layers, make_dense_linear
from kernels.linear.dense.layers import HeadLinear, KernelHeadLinear, PlainHeadLinear, make_head_linear
from kernels.linear.linear import WideningLinear
from tests.kernels.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return make_dense_linear(weight, bias)


def form_of(linear: Linear) -> object:
    """Return the function that a layer multiplies by."""
    return linear.multiply.func


def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return WideningLinear(partial(F.linear, weight=weight, bias=bias))


def onednn(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return WideningLinear(partial(layers.onednn_linear, weight=layers.pack_for_onednn(weight), bias=bias))


# oneDNN packs no float16.
FORMS: list[tuple[Callable[..., Linear], torch.dtype]] = [
    *((form, dtype) for form in (make_linear, plain) for dtype in EPSILON),
    (onednn, torch.float32),
    (onednn, torch.bfloat16),
]


@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "columns", "rows"), [(1, 64, 97), (2, 63, 33), (7, 1, 5), (33, 704, 1000)])
def test_any_shape_equals_exact_product(
    form: Callable[..., Linear], dtype: torch.dtype, has_bias: bool, num_rows: int, columns: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(num_rows, columns, generator=generator).to(dtype)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if has_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    scale = x.double().abs() @ weight.double().abs().T + 1
    linear = form(weight, bias)
    result = linear(x)
    assert result.dtype is dtype
    assert result.shape == (num_rows, rows)
    assert ((result.double() - exact).abs() <= EPSILON[dtype] * scale).all()
    wide = linear.to_float32(x)
    assert wide.dtype is torch.float32
    assert ((wide.double() - exact).abs() <= EPSILON[dtype] * scale).all()


def test_strided_rows_equal_contiguous_rows() -> None:
    x, weight = torch.randn(5, 128), torch.randn(600, 64)
    linear = make_linear(weight)
    assert torch.equal(linear(x[:, 32:96]), linear(x[:, 32:96].contiguous()))


@pytest.mark.parametrize("dtype", EPSILON)
def test_every_type_is_packed_for_the_kernel(dtype: torch.dtype) -> None:
    assert form_of(make_linear(torch.zeros(16, 16, dtype=dtype))) is cpu.linear


def test_odd_inputs_of_16_bits_are_left_to_torch() -> None:
    assert form_of(make_linear(torch.zeros(16, 15, dtype=torch.bfloat16))) is not cpu.linear
    assert form_of(make_linear(torch.zeros(16, 15, dtype=torch.float16))) is F.linear


def test_matrices_of_16_bits_are_kept_for_float32_inputs_on_a_cpu_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for half in (torch.bfloat16, torch.float16):
        assert keeps_half(half, 16, torch.float32, CPU)
        assert not keeps_half(half, 15, torch.float32, CPU)
        assert not keeps_half(half, 16, torch.bfloat16, CPU)
        assert not keeps_half(half, 16, torch.float32, torch.device("cuda"))
    assert not keeps_half(torch.float32, 16, torch.float32, CPU)
    monkeypatch.setattr(cpu, "cpu_library", lambda: None)
    assert not keeps_half(torch.float16, 16, torch.float32, CPU)


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="this torch has no oneDNN")
def test_missing_kernels_leave_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "pack_weight", lambda weight, bias: None)
    assert form_of(make_linear(torch.zeros(16, 16))) is layers.onednn_linear
    for dtype in (torch.bfloat16, torch.float16):
        elsewhere = torch.empty(16, 16, dtype=dtype, device="meta")
        assert form_of(make_linear(elsewhere)) is F.linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float32_on_a_gpu_takes_the_type_of_its_first_inputs(dtype: torch.dtype) -> None:
    """A quantized matrix that a rank has a part of is float32 where scales were taken apart."""
    assert isinstance(make_linear(torch.empty(16, 24, device="meta")), layers.NarrowingLinear)
    weight, bias, x = torch.randn(16, 24), torch.randn(16).to(dtype), torch.randn(3, 24).to(dtype)
    linear = layers.NarrowingLinear(weight, bias)
    expected = F.linear(x, weight.to(dtype), bias)
    for _ in range(2):
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear.to_float32(x), expected.float())
    assert linear(x.float()).dtype is torch.float32


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
