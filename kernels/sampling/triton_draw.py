# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The draws: the mass that each tile keeps, then one tile and one token of it; of watermarked rows, the best token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.config import SamplingConfig
from kernels.sampling.parameters import SamplingParameters

# The key of an infinite distance: keeps all tokens. See `triton_threshold`.
KEEP_ALL = tl.constexpr(0x7F800000)


@triton.jit
def tile_masses_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    maxima,
    sums,
    thresholds,
    masses,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
):
    """Program (row, group) sums the weights that `thresholds` keeps in each of `TILES` tiles, relative to the row."""
    row = tl.program_id(0).to(tl.int64)
    all_tiles = tl.arange(0, ALL_TILES)
    row_maxima = tl.load(maxima + row * num_tiles + all_tiles, mask=all_tiles < num_tiles, other=float("-inf"))
    highest = tl.max(row_maxima, axis=0)
    inverse_temperature = tl.load(inverse_temperatures + tl.load(slots + row))
    inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
    threshold = tl.load(thresholds + row)

    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    places = row * num_tiles + tiles
    is_tile = tiles < num_tiles
    distance = (highest - tl.load(maxima + places, mask=is_tile, other=float("-inf"))) * inverse_temperature
    if threshold == KEEP_ALL:
        mass = tl.load(sums + places, mask=is_tile, other=0.0) * tl.exp(-distance)
    else:
        is_kept = distance.to(tl.int32, bitcast=True) <= threshold
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        mask = (ids < vocab_size) & is_kept[:, None]
        values = tl.load(logits + row * row_stride + ids, mask=mask, other=float("-inf"))
        distances = (highest - values) * inverse_temperature
        is_kept_token = distances.to(tl.int32, bitcast=True) <= threshold
        mass = tl.sum(tl.where(is_kept_token, tl.exp(-distances), 0.0), axis=1)
    tl.store(masses + places, mass, mask=is_tile)


@triton.jit
def _uniform(seed, position):
    zero = (position ^ position).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    mantissa = ((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    return mantissa.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def draw_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    seeds,
    positions,
    maxima,
    sums,
    thresholds,
    masses,
    token_ids,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    ALL_TILES: tl.constexpr,
    MAY_TRUNCATE: tl.constexpr,
):
    """One program a row. Without `MAY_TRUNCATE`, `thresholds` and `masses` are not read."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    is_greedy = inverse_temperature == 0.0
    inverse_temperature = tl.where(is_greedy, 1.0, inverse_temperature)

    tiles = tl.arange(0, ALL_TILES)
    places = row * num_tiles + tiles
    is_tile = tiles < num_tiles
    tile_maxima = tl.load(maxima + places, mask=is_tile, other=float("-inf"))
    highest = tl.max(tile_maxima, axis=0)
    sum_of_tile = tl.load(sums + places, mask=is_tile, other=0.0)
    tile_masses = sum_of_tile * tl.exp((tile_maxima - highest) * inverse_temperature)
    is_valid = tl.sum(tile_masses, axis=0) < float("inf")
    threshold = KEEP_ALL
    if MAY_TRUNCATE:
        threshold = tl.load(thresholds + row)
        if not is_greedy:
            tile_masses = tl.load(masses + places, mask=is_tile, other=0.0)

    tile_masses = tile_masses.to(tl.float64)
    target = _uniform(tl.load(seeds + slot), tl.load(positions + row)) * tl.sum(tile_masses, axis=0)
    # Sums in another order may differ by a rounding: the last token with any weight is then the one meant.
    reached = (tl.cumsum(tile_masses, axis=0) > target) & (tile_masses > 0.0)
    tile = tl.min(tl.where(reached, tiles, ALL_TILES), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(tile_masses > 0.0, tiles, 0), axis=0))
    tile = tl.where(is_greedy, tl.min(tl.where(tile_maxima == highest, tiles, ALL_TILES - 1), axis=0), tile)
    before = tl.sum(tl.where(tiles < tile, tile_masses, 0.0), axis=0)

    offsets = tl.arange(0, TILE)
    ids = tile * TILE + offsets
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    distances = (highest - values) * inverse_temperature
    is_kept = distances.to(tl.int32, bitcast=True) <= threshold
    weights = tl.where(is_kept, tl.exp(-distances), 0.0).to(tl.float64)
    reached = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
    offset = tl.min(tl.where(reached, offsets, TILE), axis=0)
    offset = tl.minimum(offset, tl.max(tl.where(weights > 0.0, offsets, 0), axis=0))
    offset = tl.where(is_greedy, tl.min(tl.where(values == highest, offsets, TILE - 1), axis=0), offset)

    token_id = tl.where(is_valid, tile * TILE + offset, -1).to(tl.int64)
    tl.store(token_ids + row, token_id)


@triton.jit
def marked_draw_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    marks,
    maxima,
    thresholds,
    scores,
    token_ids,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    MAY_TRUNCATE: tl.constexpr,
):
    """Program (row, group) writes the highest score in `TILES` tiles and its token, where the row has a mark."""
    row = tl.program_id(0).to(tl.int64)
    mark = tl.load(marks + row)
    if mark != 0:
        all_tiles = tl.arange(0, ALL_TILES)
        row_maxima = tl.load(maxima + row * num_tiles + all_tiles, mask=all_tiles < num_tiles, other=float("-inf"))
        highest = tl.max(row_maxima, axis=0)
        inverse_temperature = tl.load(inverse_temperatures + tl.load(slots + row))
        inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
        threshold = KEEP_ALL
        if MAY_TRUNCATE:
            threshold = tl.load(thresholds + row)
        ids = tl.program_id(1) * TILES * TILE + tl.arange(0, TILES * TILE)
        is_token = ids < vocab_size
        values = tl.load(logits + row * row_stride + ids, mask=is_token, other=float("-inf"))
        distances = (highest - values) * inverse_temperature
        is_kept = is_token & (distances.to(tl.int32, bitcast=True) <= threshold)
        counter = (ids >> 2).to(tl.uint32)
        zero = counter ^ counter
        first, second, third, fourth = tl.philox(mark, counter, zero, zero, zero)
        lane = ids & 3
        word = tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
        score = tl.where(is_kept, -distances.to(tl.float64) - tl.log(-tl.log(uniform)), float("-inf"))
        best = tl.max(score, axis=0)
        place = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(scores + place, best)
        tl.store(token_ids + place, tl.min(tl.where(score == best, ids, vocab_size), axis=0).to(tl.int64))


def draw_marked(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    slots: torch.Tensor,
    parameters: SamplingParameters,
    marks: torch.Tensor,
    maxima: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    may_truncate: bool,
    config: SamplingConfig,
) -> None:
    """Replace the tokens, drawn without marks, of rows that have a mark and draw from a distribution.

    `maxima` are of each tile, `thresholds` of each row if any is truncated; the rest is as for `sample_tokens`.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, config.tile)
    groups = (num_rows, triton.cdiv(num_tiles, config.tiles))
    scores = torch.empty(groups, dtype=torch.float64, device=logits.device)
    columns = torch.empty(groups, dtype=torch.int64, device=logits.device)
    marked_draw_kernel[groups](
        logits, logits.stride(0), slots, parameters.inverse_temperature, marks, maxima, thresholds, scores, columns,
        vocab_size, num_tiles, TILE=config.tile, TILES=config.tiles, ALL_TILES=triton.next_power_of_2(num_tiles),
        MAY_TRUNCATE=may_truncate, num_warps=config.statistics_warps,
    )  # fmt: skip
    is_marked = (marks != 0) & (token_ids >= 0) & (parameters.inverse_temperature[slots] != 0)
    # The first of several: groups are in the order of tokens.
    drawn = columns.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    token_ids.copy_(torch.where(is_marked, drawn, token_ids))
