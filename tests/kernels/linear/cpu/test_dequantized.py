"""Linear layers on quantized weights on a CPU without our kernels: the same products, by dequantized copies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from kernels.linear import LinearFactory, factory
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
    """A factory without the compiled kernels."""
    monkeypatch.setattr(factory, "pack_quantized_weight", lambda *_: None)
    monkeypatch.setattr(layers, "pack_weight", lambda *_: None)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LinearFactory(lambda: 2 << 30)
    torch.set_num_threads(num_threads)


def int4() -> GroupQuantizedWeight:
    values = torch.randint(256, (ROWS, WIDE // 2), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales = random(ROWS, WIDE // 32).abs()
    return GroupQuantizedWeight(values, INT4, 32, scales, -8 * scales)


@pytest.mark.parametrize("free_bytes", [2 << 30, 0], ids=["copies", "no memory for copies"])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *ROUNDED])
def test_every_form_equals_exact_product(name: str, dtype: torch.dtype, free_bytes: int) -> None:
    form = cast_dense_parts((WEIGHT_ONLY | ROUNDED)[name], dtype)
    bias = random(form.shape[0]).to(dtype)
    layer, weight = LinearFactory(lambda: free_bytes).make(form, bias), form.dequantize().double()
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


def test_copies_use_up_half_of_the_free_memory_and_then_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    form = WEIGHT_ONLY["eight bits"]
    size = form.shape[0] * COLUMNS * 2
    made = LinearFactory(lambda: 2 * (2 * size + 1))
    for left, num_lines in ((size + 1, 0), (1, 0), (1, 1), (1, 1)):
        made.make(form)(torch.ones(1, COLUMNS, dtype=torch.bfloat16))
        assert made._copy_memory.spare_bytes == left
        assert len(caplog.messages) == num_lines
    assert "not enough memory" in caplog.text


def test_codes_are_freed_when_they_are_copied(made: LinearFactory) -> None:
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
