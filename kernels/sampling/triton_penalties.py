# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Penalties, applied to the logits in place. Rows without any cost the reading of three numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_drafts"])
def penalties_kernel(
    logits,
    row_stride,
    slots,
    repetitions,
    frequencies,
    presences,
    output_counts,
    seen_bits,
    drafts,
    num_drafts,
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
        words = tl.load(seen_bits + slot * num_words + ids // 32, mask=is_token, other=0)
        is_seen = ((words >> (ids % 32)) & 1) != 0
        counts = tl.load(output_counts + slot * vocab_size + ids, mask=is_token & is_seen, other=0)
        for draft in range(num_drafts):
            counts += (tl.load(drafts + row * num_drafts + draft) == ids).to(tl.int32)
        is_penalised = is_token & (is_seen | (counts > 0))
        places = logits + row * row_stride + ids
        values = tl.load(places, mask=is_penalised, other=0.0)
        values = tl.where(values > 0.0, tl.math.div_rn(values, repetition), values * repetition)
        values -= frequency * counts.to(tl.float32)
        values -= presence * (counts > 0).to(tl.float32)
        tl.store(places, values, mask=is_penalised)


@triton.jit
def count_tokens_kernel(output_counts, seen_bits, slots, token_ids, vocab_size, num_words):
    """Program `i` adds a token to a slot's output, unless it is negative."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + place).to(tl.int64)
    token_id = tl.load(token_ids + place)
    is_token = token_id >= 0
    tl.atomic_add(output_counts + slot * vocab_size + token_id, 1, mask=is_token, sem="relaxed")
    bit = (token_id * 0 + 1).to(tl.int32) << (token_id % 32).to(tl.int32)
    tl.atomic_or(seen_bits + slot * num_words + token_id // 32, bit, mask=is_token, sem="relaxed")
