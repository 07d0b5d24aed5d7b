"""Small integers in the bits of larger ones: how checkpoints store them, and how the engine does."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values that 32-bit words hold, the lowest bits first.

    Shapes:
        words: `[rows, columns]` int32
        result: `[rows, columns * 32 / bits]` uint8
    """
    return unpack_bytes(words.contiguous().view(torch.uint8), bits)


def unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return one value a byte, of bytes that hold one (8 bits) or two (4 bits, the low half first).

    Shapes:
        packed: `[rows, columns]` uint8
        result: `[rows, columns * 8 / bits]` uint8
    """
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def pack_bytes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Do the opposite of `unpack_bytes`; with 4 bits the number of columns must be even."""
    return values.contiguous() if bits == 8 else values[:, 0::2] | (values[:, 1::2] << 4)
