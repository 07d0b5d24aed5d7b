# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""RMS normalisation on a GPU: each row is read once and held in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gpu_config import Gpu, by_generation
from kernels.rms_norm.launch_table import RMS_NORM

MAX_SIZE = 32768


@dataclass(frozen=True, slots=True)
class RmsNormConfig:
    """How the kernel is launched.

    Attributes:
        elements_per_thread: Of a row; 8 elements of 16 bits are one access.
        max_warps: Of a program; longer rows give a thread more elements.
        min_elements: Of a program; shorter rows are taken several at a time.
    """

    elements_per_thread: int
    max_warps: int
    min_elements: int


_CONFIGS = {generation: RmsNormConfig(**entry) for generation, entry in by_generation(RMS_NORM).items()}


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    result_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Normalise BLOCK_ROWS rows."""
    wait_for_inputs()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets = rows[:, None] * SIZE + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    result = x * scale[:, None] * weight[None, :]
    tl.store(result_ptr + offsets, result.to(result_ptr.dtype.element_ty), mask=mask)


def can_run(x: torch.Tensor) -> bool:
    """Return True where a row fits the registers of a program."""
    return x.dim() == 2 and x.shape[1] <= MAX_SIZE and x.stride(1) == 1


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    gpu: Gpu,
    config: RmsNormConfig | None = None,
) -> torch.Tensor:
    """Compute what `kernels.rms_norm.rms_norm` promises, launched by `config` or else by the table."""
    config = config or _CONFIGS[gpu.generation]
    num_rows, size = x.shape
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, config.min_elements // block_size)
    num_threads = block_rows * block_size // config.elements_per_thread
    rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        result,
        x,
        residual,
        weight,
        num_rows,
        x.stride(0),
        eps,
        SIZE=size,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=max(1, min(num_threads // 32, config.max_warps)),
        **dependent_launch(x.device),
    )
    return result
