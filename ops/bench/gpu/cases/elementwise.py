"""RMS normalisation with the residual, and SiLU times the gate: bound by memory where there are many rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.activation import Activation, gated
from kernels.rms_norm import rms_norm
from ops.bench.gpu.case import OURS, Case, Entry, Op, compiled, relative_error, sets_for, sizes
from ops.bench.gpu.shapes import DENSE_MODELS, LLAMA3_8B, QWEN3_32B

EPS = 1e-5
_MANY_ROWS = 8192


def normalise(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, entry: Entry | None = None
) -> torch.Tensor:
    """Run our op; on a GPU launched by an entry where one is given, like the other ops here."""
    if entry is None or x.device.type != "cuda":
        return rms_norm(x, weight, EPS, residual)
    from kernels.rms_norm.triton_kernel import RmsNormConfig, rms_norm_triton

    return rms_norm_triton(x, weight, EPS, residual, RmsNormConfig(**entry))


def multiply_by_silu(gate_up: torch.Tensor, entry: Entry | None = None) -> torch.Tensor:
    """Run our op."""
    if entry is None or gate_up.device.type != "cuda":
        return gated(gate_up, Activation.SILU)
    from kernels.activation.triton_kernel import SiluMulConfig, gated_triton

    return gated_triton(gate_up, Activation.SILU, SiluMulConfig(**entry))


def rms_norm_error(device: torch.device, num_rows: int, size: int, entry: Entry | None = None) -> float:
    """Compare with the formula in float64, and the residual with the exact sum rounded once."""
    x, residual = torch.randn(2, num_rows, size, device=device).bfloat16()
    weight = torch.randn(size, device=device).bfloat16()
    total = (x.double() + residual.double()).bfloat16()
    scale = (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = total.double() * scale * weight.double()
    actual = normalise(x, weight, residual, entry)
    return max(relative_error(actual, expected), relative_error(residual, total))


def rms_norm_case(device: torch.device, num_rows: int, size: int) -> Case:
    """Read input and residual, write residual and output."""
    num_bytes = 4 * num_rows * size * 2
    num_sets = sets_for(num_bytes)
    inputs, residuals = torch.randn(2, num_sets, num_rows, size, device=device).bfloat16()
    weight = torch.randn(size, device=device).bfloat16()

    def in_torch(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), weight.shape, weight, EPS)

    fused = compiled(in_torch)
    return Case(
        num_bytes,
        0,
        num_sets,
        {
            OURS: lambda index, entry=None: normalise(inputs[index], weight, residuals[index], entry),
            "torch.compile": lambda index: fused(inputs[index], residuals[index]),
            "_fused_rms_norm": lambda index: in_torch(inputs[index], residuals[index]),
        },
    )


def silu_mul_error(device: torch.device, num_rows: int, size: int, entry: Entry | None = None) -> float:
    """Compare with the formula in float64."""
    gate_up = torch.randn(num_rows, 2 * size, device=device).bfloat16()
    gate, up = gate_up.double().chunk(2, dim=-1)
    return relative_error(multiply_by_silu(gate_up, entry), F.silu(gate) * up)


def silu_mul_case(device: torch.device, num_rows: int, size: int) -> Case:
    """Read both halves, write one."""
    num_bytes = 3 * num_rows * size * 2
    num_sets = sets_for(num_bytes)
    inputs = torch.randn(num_sets, num_rows, 2 * size, device=device, dtype=torch.bfloat16)

    def in_torch(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    fused = compiled(in_torch)
    return Case(
        num_bytes,
        0,
        num_sets,
        {
            OURS: lambda index, entry=None: multiply_by_silu(inputs[index], entry),
            "torch.compile": lambda index: fused(inputs[index]),
            "eager": lambda index: in_torch(inputs[index]),
        },
    )


RMS_NORM_OP = Op(rms_norm_error, rms_norm_case)
SILU_MUL_OP = Op(silu_mul_error, silu_mul_case)
RMS_NORM = RMS_NORM_OP.suite(
    "rms_norm",
    sizes((1, 4096), (7, 1023), (65, 5120), (3, 16_385), prefix="bf16 "),
    {
        f"{model.name} {rows}x{model.hidden_size}": (rows, model.hidden_size)
        for model, rows in [(LLAMA3_8B, 1), (LLAMA3_8B, 64), *((model, _MANY_ROWS) for model in DENSE_MODELS)]
    },
)
SILU_MUL = SILU_MUL_OP.suite(
    "silu_mul",
    sizes((1, 14_336), (7, 1023), (65, 3072), prefix="bf16 "),
    {
        f"{model.name} {rows}x{model.intermediate_size}": (rows, model.intermediate_size)
        for model, rows in [(LLAMA3_8B, 1), (LLAMA3_8B, 64), (LLAMA3_8B, _MANY_ROWS), (QWEN3_32B, _MANY_ROWS)]
    },
)
