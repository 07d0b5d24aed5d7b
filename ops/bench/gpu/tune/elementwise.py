"""Entries of the tables of the operations between matrices: normalisation, SiLU times the gate, rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from kernels.gpu_config import gpu_of
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from ops.bench.gpu.case import Check, sets_for
from ops.bench.gpu.cases.elementwise import EPS, rms_norm_error, silu_mul_error
from ops.bench.gpu.cases.rotation import RotationInputs, rotation_error
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_32B, ModelShape
from ops.bench.gpu.tune.choice import Entry, Problem, Tuning

_TOLERANCE = 4e-3
_ROWS = (1, 64, 8192)
Shape = tuple[int, int]


def normalise(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Launch the kernel by an entry; where there is no GPU, run the dispatched op, as do those below."""
    if x.device.type != "cuda":
        return rms_norm(x, weight, EPS, residual)
    from kernels.rms_norm.triton_kernel import RmsNormConfig, rms_norm_triton

    return rms_norm_triton(x, weight, EPS, residual, gpu_of(x.device), RmsNormConfig(**entry))


def gate(gate_up: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Launch the kernel by an entry."""
    if gate_up.device.type != "cuda":
        return silu_mul(gate_up)
    from kernels.silu_mul.triton_kernel import SiluMulConfig, silu_mul_triton

    return silu_mul_triton(gate_up, gpu_of(gate_up.device), SiluMulConfig(**entry))


def rotate(inputs: RotationInputs, entry: Entry) -> torch.Tensor:
    """Launch the kernel by an entry."""
    arguments = (
        inputs.qkv, inputs.positions, inputs.cos_sin, inputs.key_cache, inputs.value_cache, inputs.slots,
        inputs.head_norm,
    )  # fmt: skip
    if inputs.qkv.device.type != "cuda":
        return rope_kv_write(*arguments)
    from kernels.rope_kv_write.triton_kernel import RopeConfig, rope_kv_write_triton

    return rope_kv_write_triton(*arguments, gpu_of(inputs.qkv.device), config=RopeConfig(**entry))


def make_checks(
    device: torch.device,
    entry: Entry,
    error: Callable[..., float],
    launch: Callable[..., object],
    shapes: Iterable[Shape],
) -> list[Check]:
    """Compare with the formula in float64, as the bench does."""
    by_entry = partial(launch, entry=entry)
    return [Check("x".join(map(str, shape)), partial(error, device, *shape, by_entry), _TOLERANCE) for shape in shapes]


def rotation_checks(device: torch.device, entry: Entry, models: Iterable[ModelShape], num_tokens: int) -> list[Check]:
    """Compare with the reference in float32."""
    rotate_by = partial(rotate, entry=entry)
    return [Check(m.name, partial(rotation_error, device, m, num_tokens, rotate_by), _TOLERANCE) for m in models]


def normalise_problems(device: torch.device, shapes: Iterable[Shape]) -> list[Problem]:
    """Make inputs and residuals."""

    def problem(num_rows: int, size: int) -> Problem:
        num_sets = sets_for(8 * num_rows * size)
        inputs, residuals = torch.randn(2, num_sets, num_rows, size, device=device).bfloat16()
        weight = torch.ones(size, device=device).bfloat16()
        return Problem(
            f"{num_rows}x{size}",
            num_sets,
            lambda entry: lambda index: normalise(inputs[index], weight, residuals[index], entry),
        )

    return [problem(*shape) for shape in shapes]


def gate_problems(device: torch.device, shapes: Iterable[Shape]) -> list[Problem]:
    """Make both halves."""

    def problem(num_rows: int, size: int) -> Problem:
        num_sets = sets_for(6 * num_rows * size)
        inputs = torch.randn(num_sets, num_rows, 2 * size, device=device, dtype=torch.bfloat16)
        return Problem(f"{num_rows}x{size}", num_sets, lambda entry: lambda index: gate(inputs[index], entry))

    return [problem(*shape) for shape in shapes]


def rotation_problems(device: torch.device, models: Iterable[ModelShape], rows: Iterable[int]) -> list[Problem]:
    """Make heads of tokens, and a cache for them."""

    def problem(model: ModelShape, num_tokens: int) -> Problem:
        heads = model.num_heads + 2 * model.num_kv_heads
        sets = [RotationInputs(device, model, num_tokens) for _ in range(sets_for(4 * num_tokens * heads * 128))]
        return Problem(f"{model.name} {num_tokens}", len(sets), lambda entry: lambda index: rotate(sets[index], entry))

    return [problem(model, num_tokens) for model in models for num_tokens in rows]


_MODELS = (LLAMA3_8B, QWEN3_32B)
RMS_NORM = (
    Tuning(
        "RMS_NORM",
        None,
        tuple(
            {"elements_per_thread": elements, "max_warps": warps, "min_elements": least}
            for elements in (8, 16, 32)
            for warps in (8, 16, 32)
            for least in (1024, 4096)
        ),
        partial(make_checks, error=rms_norm_error, launch=normalise, shapes=((1, 4096), (7, 1023), (65, 5120))),
        partial(normalise_problems, shapes=[(rows, model.hidden_size) for model in _MODELS for rows in _ROWS]),
    ),
)
SILU_MUL = (
    Tuning(
        "SILU_MUL",
        None,
        tuple({"block": block, "num_warps": warps} for block in (512, 1024, 2048, 4096) for warps in (2, 4, 8)),
        partial(make_checks, error=silu_mul_error, launch=gate, shapes=((1, 14_336), (7, 1023), (65, 3072))),
        partial(gate_problems, shapes=[(rows, model.intermediate_size) for model in _MODELS for rows in _ROWS]),
    ),
)
ROPE_KV_WRITE = (
    Tuning(
        "ROPE_KV_WRITE",
        None,
        tuple({"block_heads": heads, "num_warps": warps} for heads in (4, 8, 16, 32, 64) for warps in (2, 4, 8)),
        partial(rotation_checks, models=_MODELS, num_tokens=65),
        partial(rotation_problems, models=_MODELS, rows=_ROWS),
    ),
)
