"""Linear layers on every quantized form against float64 arithmetic on the numbers that the form stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear import LinearFactory, factory
from kernels.linear.dense.layers import NarrowingLinear
from kernels.linear.forms import (
    Activation,
    DenseWeight,
    GroupQuantizedWeight,
    ScaledWeight,
    WeightForm,
    concatenate,
    integers,
)
from kernels.linear.gpu_packed import PackedMatrix
from kernels.linear.gpu_scaled import ScaledMatrix

EPSILON = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROWS, COLUMNS = 37, 200
FACTORY = LinearFactory(lambda: 0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def groups(bits: int, group_size: int, *, is_ordered: bool = False) -> GroupQuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(256, (ROWS, COLUMNS * bits // 8), generator=generator).to(torch.uint8)
    scales, offsets = (random(ROWS, -(-COLUMNS // group_size), seed=seed) for seed in (1, 2))
    order = torch.randperm(COLUMNS, generator=generator) if is_ordered else None
    return GroupQuantizedWeight(values, integers(bits), group_size, scales, offsets, order)


def scaled(
    dtype: torch.dtype, scales: tuple[int, int], activation: Activation = "none", rows: int = ROWS
) -> ScaledWeight:
    values = (random(rows, COLUMNS, seed=3) * 40).clamp(-127, 127).to(dtype)
    scale = torch.tensor(0.02) if activation == "static" else None
    return ScaledWeight(values, random(*scales, seed=4), activation, scale)


WEIGHT_ONLY: dict[str, WeightForm] = {
    "four bits": groups(4, 32),
    "four bits in an order": groups(4, 64, is_ordered=True),
    "eight bits": groups(8, 128),
    "eight bits in an order": groups(8, COLUMNS, is_ordered=True),
    "int8": scaled(torch.int8, (ROWS, 1)),
    "int8, one scale": scaled(torch.int8, (1, 1)),
    "float8": scaled(torch.float8_e4m3fn, (ROWS, 1)),
    "float8 blocks": scaled(torch.float8_e4m3fn, (2, 2), rows=130),
    "parts": concatenate([groups(4, 32), DenseWeight(random(5, COLUMNS)), scaled(torch.int8, (1, 1))]),
}
ROUNDED = {
    f"{dtype}, {activation}, {scales}": scaled(dtype, scales, activation, 130 if scales == (2, 2) else ROWS)
    for dtype, all_scales in ((torch.int8, [(1, 1), (ROWS, 1)]), (torch.float8_e4m3fn, [(1, 1), (ROWS, 1), (2, 2)]))
    for scales in all_scales
    for activation in ("dynamic", "static")
    if (scales, activation) != ((2, 2), "static")
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_alone_equal_exact_product(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    form = cast_dense_parts(WEIGHT_ONLY[name], dtype)
    x = random(3, COLUMNS).to(dtype)
    bias = random(form.shape[0]).to(dtype) if has_bias else None
    weight = form.dequantize().double()
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ weight.abs().T + 1
    linear = FACTORY.make(form, bias)
    result = linear(x)
    assert result.dtype is dtype
    assert result.shape == exact.shape
    # Twice: weights are rounded to the type, then the result.
    assert ((result.double() - exact).abs() <= 2 * EPSILON[dtype] * scale).all()
    wide = linear.to_float32(x)
    assert wide.dtype is torch.float32
    assert ((wide.double() - exact).abs() <= 2 * EPSILON[dtype] * scale).all()


def cast_dense_parts(form: WeightForm, dtype: torch.dtype) -> WeightForm:
    """Dense parts are of the model's type, as a checkpoint gives them."""
    parts = getattr(form, "parts", (form,))
    return concatenate([DenseWeight(p.weight.to(dtype)) if isinstance(p, DenseWeight) else p for p in parts])


def rounded_inputs(x: torch.Tensor, form: ScaledWeight) -> torch.Tensor:
    """Round inputs value by value: to integers, or to the nearest float8, of the scale they have."""
    largest = 127.0 if form.values.dtype is torch.int8 else 448.0
    block = 128 if form.scales.shape[1] > 1 else x.shape[1]
    result = torch.empty_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], block):
            part = x[row, first : first + block].float()
            scale = part.abs().max() / largest if form.activation_scale is None else form.activation_scale
            low = -128.0 if form.values.dtype is torch.int8 else -largest
            steps = (part / (scale if scale > 0 else 1)).clamp(low, largest)
            steps = steps.round() if form.values.dtype is torch.int8 else steps.to(torch.float8_e4m3fn).float()
            result[row, first : first + block] = steps.double() * scale.double()
    return result


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("dtype", EPSILON)
def test_rounded_inputs_equal_exact_product_of_what_they_round_to(name: str, dtype: torch.dtype) -> None:
    form = ROUNDED[name]
    x = (random(4, COLUMNS, seed=5) * 3).to(dtype)
    x[1] = 0
    x[2] *= 1e-3
    bias = random(form.shape[0]).to(dtype)
    weight = form.dequantize().double()
    given = rounded_inputs(x, form)
    exact = given @ weight.T + bias.double()
    scale = given.abs() @ weight.abs().T + 1
    linear = FACTORY.make(form, bias)
    assert ((linear(x).double() - exact).abs() <= EPSILON[dtype] * scale).all()
    assert ((linear.to_float32(x).double() - exact).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("form", [*WEIGHT_ONLY.values(), *ROUNDED.values()])
def test_rows_do_not_depend_on_rows_beside_them(form: WeightForm) -> None:
    linear = FACTORY.make(form)
    x = random(5, COLUMNS, seed=6)
    together = linear(x)
    torch.testing.assert_close(linear(x[2:3]), together[2:3], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [groups(4, 32), groups(8, 32), *ROUNDED.values()])
def test_no_rows_give_no_rows(form: WeightForm) -> None:
    assert FACTORY.make(form)(torch.empty(0, COLUMNS)).shape == (0, form.shape[0])


def test_weights_on_a_gpu_are_packed_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gpu_packed.pack.has_kernels", "gpu_scaled.matrix.has_kernels", "gpu_scaled.matrix.has_float8"):
        monkeypatch.setattr(f"kernels.linear.{module}", lambda _: True)
    monkeypatch.setattr(factory, "pack_quantized_weight", lambda *_: None)
    packed: list[object] = []
    for module in ("factory.packed_linear", "gpu_scaled.dispatch.scaled_linear"):
        monkeypatch.setattr(f"kernels.linear.{module}", lambda x, matrix, *_, **__: packed.append(matrix) or x)
    forms = [form for name, form in (WEIGHT_ONLY | ROUNDED).items() if name != "parts"]
    for form in forms:
        FACTORY.make(form)(torch.empty(0, COLUMNS))
    kinds = [type(weight) for weight in packed]
    assert kinds == [PackedMatrix] * (len(WEIGHT_ONLY) - 1) + [ScaledMatrix] * len(ROUNDED)


def test_groups_that_no_kernel_of_a_gpu_has_are_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.gpu_packed.pack.has_kernels", lambda _: True)
    form = replace(groups(4, 20), offsets=None).to(torch.device("meta"))
    for dtype in EPSILON:
        linear = LinearFactory(lambda: 0, dtype).make(form, torch.empty(ROWS, device="meta"))
        assert isinstance(linear, NarrowingLinear)
        assert linear._bias is not None
        assert linear._weight.dtype is linear._bias.dtype is dtype, "it needs no more memory before its first call"
        for inputs in EPSILON:
            assert linear(torch.empty(3, COLUMNS, dtype=inputs, device="meta")).dtype is inputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_every_form_on_a_gpu_equals_exact_product(num_rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for name, form in (WEIGHT_ONLY | ROUNDED).items():
        form = cast_dense_parts(form, dtype)
        x, bias = random(num_rows, COLUMNS).to(dtype), random(form.shape[0]).to(dtype)
        given = rounded_inputs(x, form) if name in ROUNDED else x.double()
        exact = given @ form.dequantize().double().T + bias.double()
        actual = FACTORY.make(form.to(device), bias.to(device))(x.to(device)).cpu().double()
        assert (actual - exact).norm() < 2 * EPSILON[dtype] * exact.norm()


def test_copy_that_does_not_fit_takes_no_memory_from_those_that_do() -> None:
    memory = factory.CopyMemory(lambda: 1000)
    assert memory.take(1)
    left = memory.spare_bytes
    assert left is not None
    assert not memory.take(left + 1)
    assert memory.take(left)
    assert not memory.take(1)
