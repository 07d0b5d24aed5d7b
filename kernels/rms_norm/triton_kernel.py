# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""RMS normalisation on a GPU: each row is read once and held in registers, in which it may be rounded to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear.forms import SCALE_BLOCK
from kernels.linear.rounding import InputRounding, RoundedRows
from kernels.linear.rounding.triton_kernel import store_rounded

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


# Reasoned, for every generation: `python -m ops.bench.gpu.tune` compares others.
CONFIG = RmsNormConfig(elements_per_thread=16, max_warps=16, min_elements=1024)


@triton.jit(do_not_specialize=["num_rows", "scales_stride"])
def rms_norm_kernel(
    result_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    scales_ptr,
    given_scale_ptr,
    num_rows,
    x_stride,
    scales_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Normalise BLOCK_ROWS rows; where there are scales, round them in parts of `WIDTH` columns."""
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
    result = (x * scale[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty)
    if scales_ptr is None:
        tl.store(result_ptr + offsets, result, mask=mask)
    else:
        numbers = result.to(tl.float32)
        store_rounded(
            result_ptr, scales_ptr, given_scale_ptr, numbers, rows, rows < num_rows, 0, SIZE, scales_stride, WIDTH
        )


def can_run(x: torch.Tensor) -> bool:
    """Return True where a row fits the registers of a program."""
    return x.dim() == 2 and x.shape[1] <= MAX_SIZE and x.stride(1) == 1


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, config: RmsNormConfig = CONFIG
) -> torch.Tensor:
    """Compute what `kernels.rms_norm.rms_norm` promises, launched by `config` or else by the table."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(result, x, weight, eps, residual, config, triton.next_power_of_2(x.shape[1]))
    return result


def rms_norm_rounded_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, rounding: InputRounding
) -> RoundedRows:
    """Compute what `kernels.rms_norm.rms_norm_rounded` promises."""
    num_rows, size = x.shape
    rounded = rounding.empty(num_rows, size, x.dtype, x.device)
    block_size = max(triton.next_power_of_2(size), SCALE_BLOCK if rounding.has_blocks else 1)
    _launch(rounded.values, x, weight, eps, residual, CONFIG, block_size, rounded, rounding)
    return rounded


def _launch(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    config: RmsNormConfig,
    block_size: int,
    rounded: RoundedRows | None = None,
    rounding: InputRounding | None = None,
) -> None:
    num_rows, size = x.shape
    block_rows = max(1, config.min_elements // block_size)
    num_threads = block_rows * block_size // config.elements_per_thread
    rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        result,
        x,
        residual,
        weight,
        None if rounded is None else rounded.scales,
        None if rounding is None else rounding.given_scale,
        num_rows,
        x.stride(0),
        0 if rounded is None else rounded.scales.stride(1),
        eps,
        SIZE=size,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        WIDTH=SCALE_BLOCK if rounding is not None and rounding.has_blocks else block_size,
        num_warps=max(1, min(num_threads // 32, config.max_warps)),
        **dependent_launch(x.device),
    )
