# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What both kernels of the gated delta rule read of the gates."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.matrix_state.triton_states import softplus


@triton.jit
def decay_and_strength(gates_ptr, tokens, mask, gates_stride, head, rate, step_bias, HEADS: tl.constexpr):
    """Return the logarithm of the decay and the strength of tokens; zeros where there is none."""
    strength = tl.load(gates_ptr + tokens * gates_stride + head, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(gates_ptr + tokens * gates_stride + HEADS + head, mask=mask, other=0.0).to(tl.float32) + step_bias
    return tl.where(mask, -rate * softplus(step), 0.0), tl.where(mask, 1.0 / (1.0 + tl.exp(-strength)), 0.0)
