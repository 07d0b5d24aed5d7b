"""Launches the Triton kernels of the gated delta rule: token by token for decodes, in chunks for prompts."""

from __future__ import annotations

import torch
import triton

from kernels.gated_delta.reference import NORM_EPS, DeltaSizes, DeltaWeights
from kernels.gated_delta.triton_chunks import gated_delta_chunks_kernel
from kernels.gated_delta.triton_config import MIN_CHUNKED_LEN, DeltaConfig, config_for
from kernels.gated_delta.triton_steps import gated_delta_steps_kernel
from kernels.gpu_config import Gpu
from kernels.state_rows import StateRows


def gated_delta_triton(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    states: torch.Tensor,
    rows: StateRows,
    gpu: Gpu,
    config: DeltaConfig | None = None,
) -> torch.Tensor:
    """Compute what `kernels.gated_delta.gated_delta` promises, launched by `config` or else by the table."""
    config = config or config_for(gpu)
    result = torch.empty(qkv.shape[0], sizes.num_value_heads, sizes.value_dim, dtype=qkv.dtype, device=qkv.device)
    is_chunked = rows.max_query_len >= MIN_CHUNKED_LEN
    kernel = gated_delta_chunks_kernel if is_chunked else gated_delta_steps_kernel
    block_value = config.chunk_block_value if is_chunked else config.block_value
    kernel[(len(rows.slots) * sizes.num_value_heads, triton.cdiv(sizes.value_dim, block_value))](
        result,
        qkv,
        gates,
        weights.rate,
        weights.step_bias,
        states,
        rows.slots,
        rows.query_starts,
        rows.context_lens,
        rows.num_kept,
        *rows.save_tensors,
        qkv.stride(0),
        gates.stride(0),
        NORM_EPS,
        sizes.key_dim**-0.5,
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        HAS_KEPT=rows.num_kept is not None,
        HAS_SAVES=rows.saves is not None,
        BLOCK_KEY=max(16, triton.next_power_of_2(sizes.key_dim)),
        BLOCK_VALUE=block_value,
        CHUNK=config.chunk,
        # Of 16 bits, inputs have no more digits than this.
        PRECISION="tf32x3" if qkv.dtype is torch.float32 else "tf32",
        num_warps=config.chunk_num_warps if is_chunked else config.num_warps,
    )
    return result
