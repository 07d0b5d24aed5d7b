"""Linear layers on quantized weights on a CPU without our kernels: the same products, by whatever torch has."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch

from kernels.linear import LinearFactory, factory
from kernels.linear.cpu.torch_operators import Measurements
from kernels.linear.dense import layers
from kernels.linear.forms import INT4, GroupQuantizedWeight, ScaledWeight
from tests.kernels.linear.test_factory import (
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
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinearFactory]:
    """A factory without the compiled kernels, which has measured nothing."""
    monkeypatch.setattr("kernels.linear.cpu.torch_operators.timing._FLUSHED_BYTES", 4096)
    monkeypatch.setattr(factory, "pack_quantized_weight", lambda *_: None)
    monkeypatch.setattr(layers, "pack_weight", lambda *_: None)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LinearFactory(lambda: 2 << 30)
    torch.set_num_threads(num_threads)


def measured(made: LinearFactory) -> Measurements:
    return made._measurements


def int4() -> GroupQuantizedWeight:
    values = torch.randint(256, (ROWS, WIDE // 2), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = random(ROWS, WIDE // 32).abs()
    return GroupQuantizedWeight(values, INT4, 32, scales, -8 * scales)


def int8(activation: str = "none") -> ScaledWeight:
    values = (random(ROWS, WIDE) * 40).clamp(-127, 127).to(torch.int8)
    return ScaledWeight(values, random(ROWS, 1).abs(), activation)  # type: ignore[arg-type]


SIZES_THAT_OPERATORS_TAKE = {"int4": int4(), "int8": int8(), "int8, rounded inputs": int8("dynamic")}


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDED, *SIZES_THAT_OPERATORS_TAKE])
def test_every_form_equals_exact_product(name: str, dtype: torch.dtype, made: LinearFactory) -> None:
    form = cast_dense_parts((WEIGHT_ONLY | ROUNDED | SIZES_THAT_OPERATORS_TAKE)[name], dtype)
    bias = random(form.shape[0]).to(dtype)
    layer, weight = made.make(form, bias), form.dequantize().double()
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


def test_no_rows_give_no_rows(made: LinearFactory) -> None:
    assert made.make(int4())(torch.empty(0, WIDE)).shape == (0, ROWS)


@pytest.mark.parametrize("form", [int4(), int8(), int8("dynamic")])
def test_without_memory_to_spare_nothing_is_dequantized(
    form: GroupQuantizedWeight | ScaledWeight,
) -> None:
    made = LinearFactory(lambda: 2 * (ROWS * WIDE * 2 - 1))
    made.make(form)(torch.ones(1, WIDE, dtype=torch.bfloat16))
    assert "dense" not in {name for names in measured(made).names.values() for name in names}
    assert measured(made).spare_bytes == ROWS * WIDE * 2 - 1


def test_dequantized_copies_use_up_half_of_the_free_memory() -> None:
    form = WEIGHT_ONLY["eight bits"]
    size = form.shape[0] * COLUMNS * 2
    made = LinearFactory(lambda: 2 * (2 * size + 1))
    for left in (size + 1, 1, 1):
        made.make(form)(torch.ones(1, COLUMNS, dtype=torch.bfloat16))
        assert measured(made).spare_bytes == left
    assert [set(names) for names in measured(made).names.values()] == [{"dense"}, {"formula"}]


def test_a_shape_is_measured_once(made: LinearFactory, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(1, WIDE, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "kernels.linear.cpu.torch_operators.measured_linear"):
        for _ in range(3):
            made.make(int4())(x)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("int4 in groups of 32, 96x256 in torch.bfloat16: ")
    assert len(measured(made).names) == 1


def test_plain_weights_are_freed_when_the_form_is_taken(made: LinearFactory) -> None:
    form = int4()
    values = weakref.ref(form.values)
    layer = made.make(form)
    del form
    assert values() is not None
    layer(torch.ones(1, WIDE, dtype=torch.bfloat16))
    gc.collect()
    assert values() is None


def test_inputs_of_another_type_are_multiplied_too(made: LinearFactory) -> None:
    layer, x = made.make(int4()), random(3, WIDE)
    first = layer(x.bfloat16())
    later = layer(x)
    assert later.dtype is torch.float32
    torch.testing.assert_close(later, first.float())
