# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""SiLU times a gate on a GPU: one access of 16 bytes to either half per thread and turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.activation.launch_table import SILU_MUL
from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gpu_config import Gpu, by_generation


@dataclass(frozen=True, slots=True)
class SiluMulConfig:
    """How the kernel is launched: `block` features of one token a program."""

    block: int
    num_warps: int


_CONFIGS = {generation: SiluMulConfig(**entry) for generation, entry in by_generation(SILU_MUL).items()}


@triton.jit
def silu_mul_kernel(result_ptr, gate_up_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Transform BLOCK features of one token, in fp32, rounded once; `grid: (num_tokens, blocks of a row)`."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + token * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    # The exponential of -|gate| cannot overflow.
    decay = tl.exp(-tl.abs(gate))
    silu = gate * tl.where(gate < 0, decay, 1.0) / (1.0 + decay)
    tl.store(result_ptr + token * SIZE + columns, (silu * up).to(result_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor, gpu: Gpu, config: SiluMulConfig | None = None) -> torch.Tensor:
    """Compute what `kernels.activation.gated` promises of SiLU, launched by `config` or else by the table."""
    config = config or _CONFIGS[gpu.generation]
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(num_tokens, triton.cdiv(size, config.block))](
        result, gate_up, SIZE=size, BLOCK=config.block, num_warps=config.num_warps, **dependent_launch(result.device)
    )
    return result
