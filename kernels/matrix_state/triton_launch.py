"""Launches the Triton kernels of a rule over the sequences of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.gpu_config import GpuGeneration
from kernels.matrix_state.launch_config import MIN_CHUNKED_LEN, LaunchConfig
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class RuleKernels:
    """The kernels of a rule, which take the same arguments: those of `launch_update`, in its order.

    Their constants are HEADS, and GROUPS of heads that share keys; KEY_DIM and VALUE_DIM, rows and columns of a state,
    and BLOCK_KEY and BLOCK_VALUE, those of a program; HAS_KEPT and HAS_SAVES; CHUNK; PRECISION of matrix products.

    Attributes:
        steps: Takes a token after the other.
        chunks: Takes several at once.
        configs: How they are launched.
    """

    steps: Any
    chunks: Any
    configs: Mapping[GpuGeneration, LaunchConfig]


def launch_update(
    kernels: RuleKernels,
    config: LaunchConfig,
    result: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    rows: StateRows,
    numbers: tuple[float, ...],
    num_groups: int,
) -> torch.Tensor:
    """Launch what is best for the sequences of a step, and return `result`.

    Args:
        kernels: One of them is launched.
        config: How.
        result: `[num_tokens, num_heads, value_dim]`, of the inputs' type; is written.
        inputs: The rule's own tensors.
        states: `[num_slots, num_heads, key_dim, value_dim]` float32; are updated.
        rows: The sequences.
        numbers: The rule's own numbers.
        num_groups: Of heads that share keys.
    """
    _, num_heads, key_dim, value_dim = states.shape
    is_chunked = rows.max_query_len >= MIN_CHUNKED_LEN
    kernel = kernels.chunks if is_chunked else kernels.steps
    block_key = max(16, triton.next_power_of_2(key_dim))
    block_value = config.block_of(block_key, is_chunked=is_chunked)
    sequences = (rows.slots, rows.query_starts, rows.context_lens, rows.num_kept, *rows.save_tensors)
    kernel[(len(rows.slots) * num_heads, triton.cdiv(value_dim, block_value))](
        *(result, *inputs, states, *sequences, *numbers),
        HEADS=num_heads,
        GROUPS=num_groups,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HAS_KEPT=rows.num_kept is not None,
        HAS_SAVES=rows.saves is not None,
        BLOCK_KEY=block_key,
        BLOCK_VALUE=block_value,
        CHUNK=config.chunk_of(block_key),
        # Inputs of 16 bits have no more digits than tf32.
        PRECISION="tf32x3" if result.dtype is torch.float32 else "tf32",
        num_warps=config.chunk_num_warps if is_chunked else config.num_warps,
    )
    return result
