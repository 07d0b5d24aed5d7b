"""Positions of sequences with images, in models whose positions have several axes.

Text counts on all axes at once. An image begins where the text before it ends; on the second and third axis its tokens
count rows and columns, on the first they all stand at its beginning. The text behind it goes on behind its longer side.
Source: Bai et al., arXiv 2502.13923, section 2.1 (M-RoPE), of still images.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.media import MediaSpan
from gpu_worker.execution.batch.transfers import Int64s


def text_positions(spans: Values[MediaSpan], places: Int64s) -> Int64s:
    """Return the positions, on the first axis, of tokens at these places of a sequence.

    Shapes:
        places, result: `[num_tokens]`, in ascending order
    """
    shift, positions = 0, places.copy()
    for span in spans:
        if span.start > places[-1]:
            break
        inside = (places >= span.start) & (places < span.end)
        positions[inside] = span.start + shift
        shift += span.num_positions - span.length
        behind = places >= span.end
        positions[behind] = places[behind] + shift
    return positions


def axis_positions(spans: Values[MediaSpan], start: int, count: int) -> Int64s:
    """Return the positions on all axes of `count` tokens of a sequence from place `start` on; `[3, count]`."""
    places = np.arange(start, start + count, dtype=np.int64)
    positions: Int64s = np.tile(text_positions(spans, places), (3, 1))
    for span in spans:
        inside = (places >= span.start) & (places < span.end)
        if inside.any():
            _, columns = span.grid
            offsets = places[inside] - span.start
            positions[1, inside] += offsets // columns
            positions[2, inside] += offsets % columns
    return positions
