# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""SiLU or GELU times other features on a GPU: an access of 16 bytes to either half, and the result may be rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.activation.reference import Activation
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.linear.rounding import InputRounding, RoundedRows
from kernels.linear.rounding.triton_kernel import BLOCKS_PER_PROGRAM, part_width, store_rounded

FUNCTIONS = frozenset({Activation.SILU, Activation.GELU, Activation.GELU_TANH})
MAX_SIZE = 32768
"""Features of a row that is rounded with one scale: a program holds it."""
_PER_THREAD = 32
_CUBIC = tl.constexpr(0.044715)
_TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_HALF_ROOT = tl.constexpr(math.sqrt(0.5))


@dataclass(frozen=True, slots=True)
class SiluMulConfig:
    """How the kernel is launched: `block` features of one token a program."""

    block: int
    num_warps: int


# Reasoned, for every generation: `python -m ops.bench.gpu.tune` compares others.
CONFIG = SiluMulConfig(block=1024, num_warps=4)


@triton.jit
def _function(x, FUNCTION: tl.constexpr):
    if FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _HALF_ROOT))
    else:
        # 1 + tanh(y) is twice the sigmoid of 2 y.
        exponent = x if FUNCTION == "silu" else x * (_TANH_SLOPE + (_TANH_SLOPE * _CUBIC) * x * x)
        # The exponential of a negative number cannot overflow.
        decay = tl.exp(-tl.abs(exponent))
        return x * tl.where(exponent < 0, decay, 1.0) / (1.0 + decay)


@triton.jit(do_not_specialize=["scales_stride"])
def gated_kernel(
    result_ptr,
    gate_up_ptr,
    scales_ptr,
    given_scale_ptr,
    scales_stride,
    FUNCTION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Transform BLOCK features of one token, in fp32, rounded once; `grid: (num_tokens, blocks of a row)`.

    Where there are scales, round the results once more, in parts of `WIDTH` features.
    """
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + token * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    result = (_function(gate, FUNCTION) * up).to(gate_up_ptr.dtype.element_ty)
    if scales_ptr is None:
        tl.store(result_ptr + token * SIZE + columns, result, mask=mask)
    else:
        rows = token + tl.arange(0, 1)
        numbers = result.to(tl.float32)[None, :]
        store_rounded(
            result_ptr, scales_ptr, given_scale_ptr, numbers, rows, rows >= 0, first, SIZE, scales_stride, WIDTH
        )


def gated_triton(gate_up: torch.Tensor, activation: Activation, config: SiluMulConfig = CONFIG) -> torch.Tensor:
    """Compute what `kernels.activation.gated` promises of `FUNCTIONS`, launched by `config` or else by the table."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(num_tokens, triton.cdiv(size, config.block))](
        result,
        gate_up,
        None,
        None,
        0,
        FUNCTION=activation.value,
        SIZE=size,
        BLOCK=config.block,
        WIDTH=0,
        num_warps=config.num_warps,
        **dependent_launch(result.device),
    )
    return result


def can_round(activation: Activation, size: int) -> bool:
    """Return True where `gated_rounded_triton` transforms rows of `size` results."""
    return activation in FUNCTIONS and size <= MAX_SIZE


def gated_rounded_triton(gate_up: torch.Tensor, activation: Activation, rounding: InputRounding) -> RoundedRows:
    """Compute what `kernels.activation.gated_rounded` promises where `can_round`.

    A scale of a row has a program for the row, one of a block those of other ops that round.
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    rounded = rounding.empty(num_tokens, size, gate_up.dtype, gate_up.device)
    width = part_width(size, rounding)
    block = width * (BLOCKS_PER_PROGRAM if rounding.has_blocks else 1)
    gated_kernel[(num_tokens, triton.cdiv(size, block))](
        rounded.values,
        gate_up,
        rounded.scales,
        rounding.given_scale,
        rounded.scales.stride(1),
        FUNCTION=activation.value,
        SIZE=size,
        BLOCK=block,
        WIDTH=width,
        num_warps=max(4, block // (32 * _PER_THREAD)),
        **dependent_launch(gate_up.device),
    )
    return rounded
