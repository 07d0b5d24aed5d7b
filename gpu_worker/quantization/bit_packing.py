"""Small integers in the bits of 32-bit words: how checkpoints store them."""

from __future__ import annotations

import torch

from kernels.linear.forms import integers


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values that words hold, the lowest bits first.

    Shapes:
        words: `[rows, columns]` int32
        result: `[rows, columns * 32 / bits]` uint8
    """
    return integers(bits).unpack(words.contiguous().view(torch.uint8))
