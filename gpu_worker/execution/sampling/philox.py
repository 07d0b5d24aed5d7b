"""Counter-based random numbers: the same seed and position give the same number, whoever asks and in whatever order.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32 with 10 rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_SHIFT = np.uint64(32)

UInt64s = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[int, int]) -> tuple[UInt64s, ...]:
    """Return four 32-bit words for each counter of four 32-bit words; all are held in 64-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: int, first_position: int, count: int) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1) for `count` consecutive positions, with 53 random bits each."""
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    zeros = np.zeros_like(positions)
    counter = (positions & _LOW, positions >> _SHIFT, zeros, zeros)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    mantissa = (high >> np.uint64(5)) << np.uint64(26) | low >> np.uint64(6)
    return mantissa.astype(np.float64) * 2.0**-53


class UniformStream:
    """The uniform numbers of one seed, computed in blocks because the cost lies in the call, not in the number."""

    __slots__ = ("_first", "_numbers", "_seed")

    _BLOCK = 256

    def __init__(self, seed: int) -> None:
        """Give numbers for this seed."""
        self._seed = seed
        self._first = 0
        self._numbers: list[float] = []

    def at(self, position: int) -> float:
        """Return the number of a position."""
        index = position - self._first
        if not 0 <= index < len(self._numbers):
            self._first = position - position % self._BLOCK
            self._numbers = uniforms(self._seed, self._first, self._BLOCK).tolist()
            index = position - self._first
        return self._numbers[index]
