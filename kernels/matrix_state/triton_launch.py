"""Launches the Triton kernel of a rule over the sequences of a step: by token for decodes, in chunks for prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.dependent_launch import dependent_launch
from kernels.matrix_state.walk import SizesT, StateStep, WeightsT
from kernels.state_rows import StateRows

MIN_CHUNKED_LEN = 16
"""Tokens of a sequence from which on chunks are used: below, a token after the other is less work."""

_TABLE_KEY_DIM = 128
"""The rows of a state that tables are for; with twice as many, programs have half the columns and tokens."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """An entry of a rule's table.

    Attributes:
        block_value: Columns of a state that a program takes through its tokens one by one.
        num_warps: Of such a program.
        chunk: Tokens that are taken at once where sequences have many.
        chunk_block_value: Columns of a program that does so.
        chunk_num_warps: Of such a program.
    """

    block_value: int
    num_warps: int
    chunk: int
    chunk_block_value: int
    chunk_num_warps: int

    def block_of(self, key_dim: int, *, is_chunked: bool) -> int:
        """Return the columns of a program whose states have this many rows."""
        return _scaled(self.chunk_block_value if is_chunked else self.block_value, key_dim)

    def chunk_of(self, key_dim: int, rows: StateRows) -> int:
        """Return the tokens processed at once with states of this many rows: 1, or a whole chunk."""
        return _scaled(self.chunk, block_of_keys(key_dim)) if rows.max_query_len >= MIN_CHUNKED_LEN else 1


def block_of_keys(key_dim: int) -> int:
    """Return the rows of a program's state, padded."""
    return max(16, int(triton.next_power_of_2(key_dim)))


def _scaled(size: int, key_dim: int) -> int:
    # Matrix products need sixteen.
    return max(16, size // max(1, key_dim // _TABLE_KEY_DIM))


def precision_of(dtype: torch.dtype) -> str:
    """Return that of matrix products: inputs of 16 bits have no more digits than tf32."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


def launch_update(
    kernel: Any,
    config: LaunchConfig,
    step: StateStep[SizesT, WeightsT],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    num_groups: int,
) -> torch.Tensor:
    """Launch a rule's kernel, in chunks where sequences are long enough, and return its result.

    The kernel's constants are HEADS, and GROUPS of heads that share keys; KEY_DIM and VALUE_DIM, rows and columns of a
    state, and BLOCK_KEY and BLOCK_VALUE, those of a program; CHUNK, tokens at once; PRECISION of matrix products.

    Args:
        kernel: Of the rule. It takes the tensors and numbers below in this order, as `gated_delta_kernel` does.
        config: How it is launched.
        step: Its states are updated.
        tensors: The rule's own, behind features and gates.
        numbers: The rule's own, behind the strides of features and gates.
        num_groups: Of heads that share keys.
    """
    (num_heads, key_dim, value_dim), rows, result = step.sizes.state_shape, step.rows, step.empty_result()
    chunk, block_key = config.chunk_of(key_dim, rows), block_of_keys(key_dim)
    is_chunked = chunk > 1
    block_value = config.block_of(block_key, is_chunked=is_chunked)
    kernel[(len(rows.slots) * num_heads, triton.cdiv(value_dim, block_value))](
        *(result, step.features, step.gates, *tensors, step.states, *rows.tensors),
        *(step.features.stride(0), step.gates.stride(0), *numbers),
        HEADS=num_heads,
        GROUPS=num_groups,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=block_key,
        BLOCK_VALUE=block_value,
        CHUNK=chunk,
        PRECISION=precision_of(result.dtype),
        num_warps=config.chunk_num_warps if is_chunked else config.num_warps,
        **dependent_launch(result.device),
    )
    return result
