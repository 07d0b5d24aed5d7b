from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.activation import Activation, gated
from kernels.activation.reference import gated_reference
from kernels.activation.triton_kernel import MAX_SIZE, can_round, gated_rounded_triton, gated_triton
from kernels.linear.rounding.triton_kernel import quantize_tokens_triton
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import ROUNDINGS, assert_close, assert_same_rounded

FUNCTIONS = [Activation.SILU, Activation.GELU, Activation.GELU_TANH]


def check(num_tokens: int, size: int, dtype: torch.dtype, activation: Activation, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up = torch.randn(num_tokens, 2 * size, generator=generator).to(device, dtype)
    expected = gated_reference(gate_up.double(), activation).to(dtype)
    with poisoned_memory():
        actual = gated_triton(gate_up, activation)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 77), (5, 1024), (2, 2500)])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_rows_of_any_size_equal_reference(
    activation: Activation, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(num_tokens, size, dtype, activation, device)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 77), (5, 1024), (2, 2500)])
def test_rounded_rows_are_those_of_two_launches(
    num_tokens: int, size: int, activation: Activation, rounding: str, device: torch.device
) -> None:
    wanted = ROUNDINGS[rounding]
    gate_up = torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(size)).to(device, torch.float16)
    expected = quantize_tokens_triton(gated_triton(gate_up, activation), wanted)
    with poisoned_memory():
        actual = gated_rounded_triton(gate_up, activation, wanted)
    assert_same_rounded(actual, expected)


def test_what_no_program_holds_is_rounded_by_itself() -> None:
    assert can_round(Activation.SILU, MAX_SIZE)
    assert not can_round(Activation.SILU, MAX_SIZE + 1)
    assert not can_round(Activation.RELU, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 14336), (77, 3072), (4096, 9728), (70_000, 40)])
def test_bfloat16_rows_equal_reference(num_tokens: int, size: int, device: torch.device) -> None:
    for activation in FUNCTIONS:
        check(num_tokens, size, torch.bfloat16, activation, device)


def test_large_gates_stay_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]])
    assert torch.equal(gated_triton(gate_up, Activation.SILU).cpu(), expected)


def test_reference_equals_equation() -> None:
    gate, up = torch.randn(2, 3, 20, dtype=torch.float64)
    torch.testing.assert_close(
        gated_reference(torch.cat((gate, up), dim=1), Activation.SILU), gate / (1 + (-gate).exp()) * up
    )


def test_cpu_tensors_equal_reference() -> None:
    gate_up = torch.randn(3, 8)
    assert_close(gated(gate_up, Activation.SILU), gated_reference(gate_up, Activation.SILU))
