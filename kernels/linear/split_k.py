"""Into how many parts the input features of a product are divided, where its tiles are too few to fill a GPU."""

from __future__ import annotations

MAX_SPLITS = 8
MIN_BLOCK_N = 64
"""Fewest output features of a program: the wide side of wgmma."""


def best_num_splits(num_tiles: int, at_once: int, limit: int, part_share: float) -> int:
    """Return how many programs share a tile.

    The best number fills whole waves of programs, and is so small that writing and reading the parts costs little
    beside reading the weight once.

    Args:
        num_tiles: Tiles of the result.
        at_once: Programs that the GPU runs at the same time.
        limit: Most splits there can be; no more than `MAX_SPLITS` are chosen.
        part_share: Bytes of the parts that a further split adds, over the bytes of the weight.
    """

    def efficiency(num_splits: int) -> float:
        programs = num_tiles * num_splits
        filled = programs / (-(-programs // at_once) * at_once)
        return filled / (1 + (part_share * num_splits if num_splits > 1 else 0.0))

    return max(range(1, max(1, min(limit, MAX_SPLITS)) + 1), key=efficiency)
