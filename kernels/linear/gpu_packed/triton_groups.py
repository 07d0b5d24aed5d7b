# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Reads `GroupNumbers` on a GPU: words of a block, which are loaded while the block before is multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(numbers, rows, block, num_rows, GROUPS: tl.constexpr):
    """Return the words of a block for some rows of `num_rows`; `GROUPS` are the `constants`. None without numbers."""
    words = ()
    if numbers is not None:
        WORDS: tl.constexpr = GROUPS[1]
        STEP: tl.constexpr = GROUPS[2]
        places = numbers + (block // STEP) * (WORDS * num_rows) + rows
        for word in tl.static_range(WORDS):
            words += (tl.load(places + word * num_rows),)
    return words


@triton.jit
def number_of(words, PART: tl.constexpr, GROUPS: tl.constexpr):
    """Return the numbers of a part of the block, in float32."""
    KIND: tl.constexpr = GROUPS[0]
    if KIND == "FP32":
        return words[PART].to(tl.float32, bitcast=True)
    else:
        BITS: tl.constexpr = 8 if KIND == "E8M0" else 16
        PER_WORD: tl.constexpr = 32 // BITS
        word = words[PART // PER_WORD] >> (BITS * (PART % PER_WORD))
        if KIND == "E8M0":
            return ((word & 255) << 23).to(tl.float32, bitcast=True)
        elif KIND == "BF16":
            return (word << 16).to(tl.float32, bitcast=True)
        else:
            return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
