# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Bitmask of logits on a GPU. No logit is read: forbidden ones are overwritten, the others left alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Bound by its writes on every generation; this many words a program is 4096 tokens.
_WORDS = 128
_NUM_WARPS = 4


@triton.jit
def bitmask_kernel(logits, row_stride, rows, bitmask, vocab_size, num_words, WORDS: tl.constexpr):
    """Program (mask, block) writes minus infinity where `WORDS` words of a mask have zeros."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask).to(tl.int64)
    word_ids = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    words = tl.load(bitmask + mask * num_words + word_ids, mask=word_ids < num_words, other=-1)
    bits = tl.arange(0, 32)[None, :]
    is_forbidden = ((words[:, None] >> bits) & 1) == 0
    token_ids = word_ids[:, None] * 32 + bits
    minus_infinity = tl.full([WORDS, 32], float("-inf"), dtype=tl.float32)
    tl.store(logits + row * row_stride + token_ids, minus_infinity, mask=is_forbidden & (token_ids < vocab_size))


def forbid_tokens_triton(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Do what `kernels.logits_bitmask.forbid_tokens` promises."""
    num_masks, num_words = bitmask.shape
    if num_masks:
        bitmask_kernel[(num_masks, triton.cdiv(num_words, _WORDS))](
            logits, logits.stride(0), rows, bitmask, logits.shape[1], num_words, WORDS=_WORDS, num_warps=_NUM_WARPS
        )
