"""Launches the Triton kernels of Mamba-2's state update: token by token for decodes, in chunks for prompts."""

from __future__ import annotations

import torch
import triton

from kernels.gpu_config import Gpu
from kernels.ssd.reference import SsdSizes, SsdWeights
from kernels.ssd.triton_chunks import ssd_chunks_kernel
from kernels.ssd.triton_config import MIN_CHUNKED_LEN, SsdConfig, config_for
from kernels.ssd.triton_steps import ssd_steps_kernel
from kernels.state_rows import StateRows


def ssd_triton(
    features: torch.Tensor,
    steps: torch.Tensor,
    weights: SsdWeights,
    sizes: SsdSizes,
    states: torch.Tensor,
    rows: StateRows,
    gpu: Gpu,
    config: SsdConfig | None = None,
) -> torch.Tensor:
    """Compute what `kernels.ssd.ssd` promises, launched by `config` or else by the table."""
    config = config or config_for(gpu)
    result = torch.empty(
        features.shape[0], sizes.num_heads, sizes.head_dim, dtype=features.dtype, device=features.device
    )
    is_chunked = rows.max_query_len >= MIN_CHUNKED_LEN
    kernel = ssd_chunks_kernel if is_chunked else ssd_steps_kernel
    block_state = max(16, triton.next_power_of_2(sizes.state_size))
    block_value = config.block_of(block_state, is_chunked=is_chunked)
    kernel[(len(rows.slots) * sizes.num_heads, triton.cdiv(sizes.head_dim, block_value))](
        result,
        features,
        steps,
        weights.rate,
        weights.step_bias,
        weights.skip,
        states,
        rows.slots,
        rows.query_starts,
        rows.context_lens,
        rows.num_kept,
        *rows.save_tensors,
        features.stride(0),
        steps.stride(0),
        weights.min_step,
        weights.max_step,
        HEADS=sizes.num_heads,
        GROUPS=sizes.num_groups,
        STATE=sizes.state_size,
        HEAD_DIM=sizes.head_dim,
        HAS_KEPT=rows.num_kept is not None,
        HAS_SAVES=rows.saves is not None,
        BLOCK_STATE=block_state,
        BLOCK_VALUE=block_value,
        CHUNK=config.chunk_of(block_state),
        # Of 16 bits, inputs have no more digits than this.
        PRECISION="tf32x3" if features.dtype is torch.float32 else "tf32",
        num_warps=config.chunk_num_warps if is_chunked else config.num_warps,
    )
    return result
