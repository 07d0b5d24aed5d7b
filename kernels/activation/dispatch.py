"""Chooses the implementation of an activation for the tensors at hand; xIELU is made of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kernels.activation.reference import Activation, activate_reference, gated_reference
from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gpu_config import is_triton_installed
from kernels.linear.rounding import InputRounding, RoundedRows, round_rows

# The numbers of `FunctionNumber` in cpu.cpp. Functions not listed round nothing: torch's own operators do as well.
FUNCTIONS: Mapping[Activation, int] = MappingProxyType(
    {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
)
SIGMOID = 3


def can_run(x: torch.Tensor) -> bool:
    """Return True where the kernel supports the type; layouts are brought into the one that it takes."""
    return x.is_cpu and x.dtype in DTYPE_NUMBERS and x.dim() > 0


def activation_cpu(
    library: CpuLibrary, x: torch.Tensor, function: int, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a function of every number of `x`, times the number of `factor` at its place."""
    rows, factors = _rows(x), None if factor is None else _rows(factor)
    result = torch.empty(rows.shape, dtype=x.dtype)
    strides = rows.stride(0), 0 if factors is None else factors.stride(0)
    numbers = function, DTYPE_NUMBERS[x.dtype], torch.get_num_threads()
    library.activation(*addresses_of(rows, factors, result), *strides, *rows.shape, *numbers)
    return result.view(x.shape)


def silu_mul_cpu(library: CpuLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """Do what `kernels.activation.gated` promises of SiLU, for contiguous rows."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_rows, size, dtype=gate_up.dtype)
    library.silu_mul(
        gate_up.data_ptr(), result.data_ptr(), num_rows, size, DTYPE_NUMBERS[gate_up.dtype], torch.get_num_threads()
    )
    return result


def _rows(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class Xielu:
    """xIELU of one layer: a parabola above zero, below it a line that an exponential bends, by learned numbers.

    `positive x^2 + linear x` above zero, and `negative (exp(min(x, limit)) - 1 - x) + linear x` below.

    Source: Huang, "Deriving Activation Functions Using Integration", arXiv 2411.13010, equation 6; `limit` is of the
    authors' code.
    """

    positive: float
    negative: float
    linear: float
    limit: float

    @classmethod
    def learned(cls, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Xielu:
        """Return the function of a checkpoint's numbers: the first two are stored as inputs of softplus."""
        above, below = (torch.nn.functional.softplus(torch.tensor(alpha)).item() for alpha in (alpha_p, alpha_n))
        return cls(above, beta + below, beta, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of every number of `x`, computed in float32 and rounded once.

        On a CPU a row's bits do not depend on the rows beside it.
        """
        wide = x.float()
        falling = (_expm1(wide.clamp(max=self.limit)) - wide) * self.negative
        bent = torch.where(wide > 0, wide * wide * self.positive, falling)
        return (bent + wide * self.linear).to(x.dtype)


def _expm1(x: torch.Tensor) -> torch.Tensor:
    """Return `exp(x) - 1` of numbers below zero.

    With compiled kernels by `s = 1 / (1 + exp(-x))`, as `(2 s - 1) / (1 - s)`, to 3e-7: torch's own exponential rounds
    by where a number lies among those of the step.
    """
    if can_run(x) and (library := cpu_library()) is not None:
        sigmoid = activation_cpu(library, x, SIGMOID)
        return (2 * sigmoid - 1) / (1 - sigmoid)
    return torch.expm1(x)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` for rows that hold the gate's features, then the up projection's.

    On a CPU a row's bits do not depend on the rows beside it. Source: Shazeer, arXiv 2002.05202, section 2.

    Shapes:
        gate_up: `[num_tokens, 2 * size]`
        result: `[num_tokens, size]`
    """
    if gate_up.is_cuda and is_triton_installed():
        from kernels.activation.triton_kernel import FUNCTIONS as ON_GPU
        from kernels.activation.triton_kernel import gated_triton

        if activation in ON_GPU:
            return gated_triton(gate_up, activation)
    if can_run(gate_up) and (library := cpu_library()) is not None:
        if activation is Activation.SILU and gate_up.is_contiguous():
            return silu_mul_cpu(library, gate_up)
        if activation in FUNCTIONS and activation is not Activation.SILU:
            gate, up = gate_up.chunk(2, dim=-1)
            return activation_cpu(library, gate, FUNCTIONS[activation], up)
    return gated_reference(gate_up, activation)


def gated_rounded(gate_up: torch.Tensor, activation: Activation, rounding: InputRounding) -> RoundedRows:
    """Round what `gated` returns, to the same bits, in one launch; for the GPUs that have products of such rows."""
    from kernels.activation import triton_kernel

    if triton_kernel.can_round(activation, gate_up.shape[1] // 2):
        return triton_kernel.gated_rounded_triton(gate_up, activation, rounding)
    return round_rows(gated(gate_up, activation), rounding)


def activate(x: torch.Tensor, activation: Activation | Xielu) -> torch.Tensor:
    """Return the function of every number of `x`, which has any shape; its rows are those of the last dimension.

    On a CPU a row's bits do not depend on the rows beside it.
    """
    if isinstance(activation, Xielu):
        return activation(x)
    if activation in FUNCTIONS and can_run(x) and (library := cpu_library()) is not None:
        return activation_cpu(library, x, FUNCTIONS[activation])
    return activate_reference(x, activation)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `x` times the sigmoid of its gates, one for each number or one for each row.

    On a CPU a row's bits do not depend on the rows beside it.

    Shapes:
        x, result: `[num_rows, size]`
        gate: `[num_rows, size]` or `[num_rows, 1]`
    """
    if can_run(gate) and (library := cpu_library()) is not None:
        if gate.shape == x.shape and gate.dtype is x.dtype:
            return activation_cpu(library, gate, SIGMOID, x)
        return x * activation_cpu(library, gate, SIGMOID).to(x.dtype)
    return x * torch.sigmoid(gate).to(x.dtype)
