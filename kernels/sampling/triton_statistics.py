# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""First read of the logits: maximum, minimum and sum of weights of each tile of the vocabulary.

Everything later is decided from these few numbers, and reads only the tiles that matter. A weight is the exponential
of a logit's distance to a maximum, times the inverse temperature; here, to the maximum of its own tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_statistics_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    maxima,
    minima,
    sums,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (row, group) reads `TILES` tiles. `minima` leaves out minus infinity; a NaN shows in `sums`."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inverse_temperature = tl.load(inverse_temperatures + tl.load(slots + row))
    inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    maximum = tl.max(values, axis=1)
    minimum = tl.min(tl.where(values == float("-inf"), float("inf"), values), axis=1)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp((values - base[:, None]) * inverse_temperature), axis=1)
    places = row * num_tiles + tiles
    is_tile = tiles < num_tiles
    tl.store(maxima + places, maximum, mask=is_tile)
    tl.store(minima + places, minimum, mask=is_tile)
    tl.store(sums + places, total, mask=is_tile)
