"""The compiled nonlinear functions against torch in float64, and rows alone against rows among others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.activations import XIELUActivation

from kernels.activation import Activation, Xielu, activate, gated, times_sigmoid
from kernels.activation.reference import activate_reference
from tests.kernels.poisoned_memory import poisoned_memory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a last place of numbers of about 10.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 6e-3}
SIZES = (1, 20, 77, 1000)
NAMED = [kind for kind in Activation if kind is not Activation.XIELU]
XIELU = Xielu(0.7, 1.3, 0.5, -1e-6)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NAMED)
def test_functions_equal_the_definition(activation: Activation, dtype: torch.dtype) -> None:
    x = numbers(5, 3, 77, dtype=dtype)
    with poisoned_memory():
        result = activate(x, activation)
        times = gated(x.flatten(0, 1)[:, :76].contiguous(), activation)
    assert result.dtype is times.dtype is dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), activate_reference(x.double(), activation), atol=tolerance, rtol=1e-2)
    gate, up = x.double().flatten(0, 1)[:, :76].chunk(2, dim=1)
    expected = activate_reference(gate.contiguous(), activation) * up
    torch.testing.assert_close(times.double(), expected, atol=4 * tolerance, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_gates", [1, 77])
def test_sigmoids_of_gates_equal_the_definition(num_gates: int, dtype: torch.dtype) -> None:
    x, gate = numbers(5, 77, dtype=dtype), numbers(5, num_gates, dtype=dtype)
    expected = x.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(times_sigmoid(x, gate).double(), expected, atol=2 * TOLERANCES[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu_equals_transformers(dtype: torch.dtype) -> None:
    definition = XIELUActivation(XIELU.positive, XIELU.negative, XIELU.linear, XIELU.limit, dtype=torch.float64)
    x = numbers(5, 3, 77, dtype=dtype)
    x[0, 0, :4] = torch.tensor([0.0, -1e-7, -1e4, 1e2]).to(dtype)
    result = activate(x, XIELU)
    assert result.dtype is dtype
    with torch.no_grad():
        expected = definition(x.double())
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=1e-2)


def test_xielu_has_numbers_of_each_layer() -> None:
    with pytest.raises(ValueError, match="call its Xielu"):
        activate(torch.zeros(1, 2), Activation.XIELU)


def test_extreme_numbers_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e15, torch.nan]])
    for activation in (Activation.GELU, Activation.GELU_TANH, Activation.SILU):
        expected = functional.relu(x)
        torch.testing.assert_close(activate(x, activation), expected, equal_nan=True, atol=1e-30, rtol=1e-6)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{f"activate {kind.value}": lambda x, kind=kind: activate(x, kind) for kind in NAMED},
    **{f"gated {kind.value}": lambda x, kind=kind: gated(torch.cat((x, -x), 1), kind) for kind in NAMED},
    "activate xielu": XIELU,
    "gates of heads": lambda x: times_sigmoid(x, x.flip(1)),
    "gate of a row": lambda x: times_sigmoid(x, x[:, :1].float()),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_row_is_the_same_alone_and_among_others(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    for size in SIZES:
        x = numbers(34, size, dtype=dtype)
        alone = torch.cat([function(row[None]) for row in x])
        for num_rows in (2, 3, 7, 16, 33):
            assert torch.equal(function(x[1 : num_rows + 1]), alone[1 : num_rows + 1]), (size, num_rows)
