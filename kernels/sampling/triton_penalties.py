# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Penalties, applied to the logits in place. Rows without any cost the reading of three numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalties_kernel(
    logits,
    row_stride,
    slots,
    repetitions,
    frequencies,
    presences,
    output_counts,
    prompt_bits,
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
):
    """Program (row, block) penalises `BLOCK` tokens. Rounds as torch does: compile without contraction to fma."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = tl.load(repetitions + slot)
    frequency = tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_token = ids < vocab_size
        counts = tl.load(output_counts + slot * vocab_size + ids, mask=is_token, other=0)
        words = tl.load(prompt_bits + slot * num_words + ids // 32, mask=is_token, other=0)
        is_seen = (counts > 0) | (((words >> (ids % 32)) & 1) != 0)
        places = logits + row * row_stride + ids
        values = tl.load(places, mask=is_seen, other=0.0)
        values = tl.where(values > 0.0, tl.math.div_rn(values, repetition), values * repetition)
        values -= frequency * counts.to(tl.float32)
        values -= presence * (counts > 0).to(tl.float32)
        tl.store(places, values, mask=is_seen)
