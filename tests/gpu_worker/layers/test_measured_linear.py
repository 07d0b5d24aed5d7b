"""Linear layers on quantized weights on a CPU without our kernels: the same products, by whatever torch has."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch

from gpu_worker.layers import linear, measured_linear, quantized_linear
from gpu_worker.layers.linear import make_linear
from gpu_worker.layers.measured_linear import Measured
from gpu_worker.quantization.weight_forms import GroupQuantizedWeight, ScaledWeight
from tests.gpu_worker.layers.test_quantized_linear import (
    COLUMNS,
    EPSILON,
    ROUNDED,
    WEIGHT_ONLY,
    cast_dense_parts,
    random,
    rounded_inputs,
)

ROWS, WIDE = 96, 256


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    """A process without the compiled kernels, which has measured nothing."""
    process = Measured(spare_bytes=1 << 30)
    monkeypatch.setattr(measured_linear, "measured", lambda: process)
    monkeypatch.setattr("kernels.linear.cpu.torch_operators.timing._FLUSHED_BYTES", 4096)
    monkeypatch.setattr(quantized_linear, "pack_quantized_weight", lambda *_: None)
    monkeypatch.setattr(linear, "pack_weight", lambda *_: None)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield process
    torch.set_num_threads(num_threads)


def int4() -> GroupQuantizedWeight:
    values = torch.randint(256, (ROWS, WIDE // 2), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = random(ROWS, WIDE // 32).abs()
    return GroupQuantizedWeight(values, 4, 32, scales, -8 * scales)


def int8(activation: str = "none") -> ScaledWeight:
    values = (random(ROWS, WIDE) * 40).clamp(-127, 127).to(torch.int8)
    return ScaledWeight(values, random(ROWS, 1).abs(), activation)  # type: ignore[arg-type]


SIZES_THAT_OPERATORS_TAKE = {"int4": int4(), "int8": int8(), "int8, rounded inputs": int8("dynamic")}


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDED, *SIZES_THAT_OPERATORS_TAKE])
def test_every_form_equals_exact_product(name: str, dtype: torch.dtype) -> None:
    form = cast_dense_parts((WEIGHT_ONLY | ROUNDED | SIZES_THAT_OPERATORS_TAKE)[name], dtype)
    bias = random(form.shape[0]).to(dtype)
    layer, weight = make_linear(form, bias), form.dequantize().double()
    for num_rows in (1, 5, 20, 40):
        x = random(num_rows, form.shape[1]).to(dtype)
        is_rounded = isinstance(form, ScaledWeight) and form.activation != "none"
        given = rounded_inputs(x, form) if is_rounded else x.double()  # type: ignore[arg-type]
        exact, size = given @ weight.T + bias.double(), given.abs() @ weight.abs().T + 1
        result, wide = layer(x), layer.to_float32(x)
        assert result.dtype is dtype
        assert wide.dtype is torch.float32
        assert ((result.double() - exact).abs() <= 2 * EPSILON[dtype] * size).all()
        assert ((wide.double() - exact).abs() <= 2 * EPSILON[dtype] * size).all()


def test_no_rows_give_no_rows() -> None:
    assert make_linear(int4())(torch.empty(0, WIDE)).shape == (0, ROWS)


@pytest.mark.parametrize("form", [int4(), int8(), int8("dynamic")])
def test_without_memory_to_spare_nothing_is_dequantized(
    process: Measured, form: GroupQuantizedWeight | ScaledWeight
) -> None:
    process.spare_bytes = ROWS * WIDE * 2 - 1
    make_linear(form)(torch.ones(1, WIDE, dtype=torch.bfloat16))
    assert "dense" not in {name for names in process.names.values() for name in names}
    assert process.spare_bytes == ROWS * WIDE * 2 - 1


def test_dequantized_copies_use_up_the_spare_memory(process: Measured) -> None:
    form = WEIGHT_ONLY["eight bits"]
    size = form.shape[0] * COLUMNS * 2
    process.spare_bytes = 2 * size + 1
    for left in (size + 1, 1, 1):
        make_linear(form)(torch.ones(1, COLUMNS, dtype=torch.bfloat16))
        assert process.spare_bytes == left
    assert [set(names) for names in process.names.values()] == [{"dense"}, {"formula"}]


def test_a_shape_is_measured_once(process: Measured, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, WIDE, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "gpu_worker.layers.measured_linear"):
        for _ in range(3):
            make_linear(int4())(x)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("4-bit groups of 32, 96x256 in torch.bfloat16: ")
    assert len(process.names) == 1


def test_plain_weights_are_freed_when_the_form_is_taken() -> None:
    form = int4()
    values = weakref.ref(form.values)
    layer = make_linear(form)
    del form
    assert values() is not None
    layer(torch.ones(1, WIDE, dtype=torch.bfloat16))
    gc.collect()
    assert values() is None


def test_inputs_of_another_type_are_multiplied_too() -> None:
    layer, x = make_linear(int4()), random(3, WIDE)
    first = layer(x.bfloat16())
    later = layer(x)
    assert later.dtype is torch.float32
    torch.testing.assert_close(later, first.float())
