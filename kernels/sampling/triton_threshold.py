# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The smallest weight that each row keeps under `min_p`, `top_k` and `top_p`, without a sort.

A token's *distance* is (row's maximum - logit) * inverse temperature, at least 0; its *key* is the distance's bits as
an integer, which keep the order: the smaller the key, the likelier the token. All truncations then ask the same
question: the smallest key at which a sum over tokens up to this key, of ones (`top_k`) or of weights (`top_p`), reaches
a bound. It is answered by narrowing an interval of keys, several pivots a reading, until so few tokens lie inside that
they can be listed, and then on the list alone. The statistics of the tiles give the first interval, and say which tiles
need no reading: with `top_k` of 50, or the peaked distribution of a language model, nearly all, and the list is made at
once. A flat distribution takes two or three readings more.

Source: the pivots are those of FlashInfer's sorting-free sampling (2025), with several a reading instead of rejection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton_draw import KEEP_ALL

# A list is tried at once where at most this many tokens of each tile that has any would fill it.
TOKENS_PER_NEAR_TILE = tl.constexpr(8)


@triton.jit
def _key(distance):
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def _distance(key):
    return key.to(tl.float32, bitcast=True)


@triton.jit
def _smallest_reaching(keys, weights, sum_before, bound, low, high, PIVOTS: tl.constexpr):
    """Return the smallest key in (low, high] up to which `weights` sum up to `bound`; `high` where none does."""
    steps = tl.arange(0, PIVOTS) + 1
    while high - low > 1:
        stride = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = tl.minimum(low + stride * steps, high - 1)
        inside = keys[None, :] <= pivots[:, None]
        is_reached = sum_before + tl.sum(tl.where(inside, weights[None, :], 0.0), axis=1) >= bound
        low = tl.maximum(low, tl.max(tl.where(is_reached, low, pivots), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_reached, pivots, high), axis=0))
    return high


@triton.jit
def _distances(
    row_logits, row_maxima, start, highest, scale, high, vocab_size,
    TILE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Read the distances of `ROWS * TILES` tiles, infinite in tiles that have none up to `high`.

    Shapes:
        result: `[ROWS, TILES, TILE]`; a thread holds all `ROWS` of its elements, so sums over them move nothing.
    """
    tiles = start + tl.arange(0, ROWS)[:, None] * TILES + tl.arange(0, TILES)[None, :]
    is_tile = tiles * TILE < vocab_size
    nearest = (highest - tl.load(row_maxima + tiles, mask=is_tile, other=float("-inf"))) * scale
    is_near = is_tile & (_key(nearest) <= high)
    ids = tiles[:, :, None] * TILE + tl.arange(0, TILE)[None, None, :]
    mask = is_near[:, :, None] & (ids < vocab_size)
    return (highest - tl.load(row_logits + ids, mask=mask, other=float("-inf"))) * scale


@triton.jit
def _list_keys(
    row_logits, row_maxima, row_list, highest, scale, low, high, vocab_size, num_tiles,
    TILE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """List the keys in (low, high], and return how many there are; past `CAPACITY` they are only counted."""
    # Threads that are behind may still read the last list.
    tl.debug_barrier()
    length = low * 0
    for start in tl.range(0, num_tiles, ROWS * TILES):
        distances = _distances(row_logits, row_maxima, start, highest, scale, high, vocab_size, TILE, ROWS, TILES)
        keys = tl.reshape(_key(distances), [ROWS * TILES * TILE], can_reorder=True)
        is_inside = (keys > low) & (keys <= high)
        found = tl.sum(is_inside.to(tl.int32), axis=0)
        if (found > 0) & (length < CAPACITY):
            entries = length + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
            tl.store(row_list + entries, keys, mask=is_inside & (entries < CAPACITY))
        length += found
    tl.debug_barrier()
    return length


@triton.jit
def _listed(row_list, length, CAPACITY: tl.constexpr):
    entries = tl.arange(0, CAPACITY)
    return tl.load(row_list + entries, mask=entries < length, other=KEEP_ALL)


@triton.jit
def _sums_up_to(
    row_logits, row_maxima, highest, scale, low, pivots, high, vocab_size, num_tiles,
    TILE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return numbers and weights of the tokens in (low, pivot] for each of the `pivots`, which are at most `high`."""
    counts = tl.zeros([PIVOTS, TILES, TILE], dtype=tl.float32)
    masses = tl.zeros([PIVOTS, TILES, TILE], dtype=tl.float32)
    for start in tl.range(0, num_tiles, ROWS * TILES, num_stages=STAGES):
        distances = _distances(row_logits, row_maxima, start, highest, scale, high, vocab_size, TILE, ROWS, TILES)
        keys = _key(distances)
        weights = tl.exp(-distances)
        inside = (keys > low)[None, :, :, :] & (keys[None, :, :, :] <= pivots[:, None, None, None])
        counts += tl.sum(tl.where(inside, 1.0, 0.0), axis=1)
        masses += tl.sum(tl.where(inside, weights[None, :, :, :], 0.0), axis=1)
    return tl.sum(tl.sum(counts, axis=2), axis=1), tl.sum(tl.sum(masses, axis=2), axis=1)


@triton.jit
def _pivots_between(low, high, PIVOTS: tl.constexpr):
    """Return keys inside (low, high) whose distances are evenly spaced: halving bits would crowd them around 0."""
    nearest = _distance(tl.maximum(low, 0))
    farthest = _distance(high)
    fractions = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / (PIVOTS + 1)
    keys = _key(nearest + (farthest - nearest) * fractions)
    return tl.minimum(tl.maximum(keys, low + 1), high - 1)


@triton.jit
def _narrow(
    row_logits, row_maxima, row_list, highest, scale, high, by_count, bound, is_listed, length, vocab_size, num_tiles,
    TILE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Return the smallest key up to `high` up to which there are `bound` tokens, or weights of this sum.

    `is_listed` says that the list holds the `length` keys up to `high`; if not, it is overwritten.
    """
    low = length * 0 - 1
    count_before = bound * 0.0
    sum_before = bound * 0.0
    count_at_high = vocab_size.to(tl.float32)
    while (is_listed == 0) & (high - low > 1):
        pivots = _pivots_between(low, high, PIVOTS)
        counts, masses = _sums_up_to(
            row_logits, row_maxima, highest, scale, low, pivots, high, vocab_size, num_tiles,
            TILE, ROWS, TILES, PIVOTS, STAGES,
        )  # fmt: skip
        counts += count_before
        sums = tl.where(by_count, counts, sum_before + masses)
        is_reached = sums >= bound
        low = tl.maximum(low, tl.max(tl.where(is_reached, low, pivots), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_reached, pivots, high), axis=0))
        sum_before = tl.maximum(sum_before, tl.max(tl.where(is_reached, 0.0, sums), axis=0))
        count_before = tl.maximum(count_before, tl.max(tl.where(is_reached, 0.0, counts), axis=0))
        count_at_high = tl.minimum(count_at_high, tl.min(tl.where(is_reached, counts, count_at_high), axis=0))
        if count_at_high - count_before <= CAPACITY:
            length = _list_keys(
                row_logits, row_maxima, row_list, highest, scale, low, high, vocab_size, num_tiles,
                TILE, ROWS, TILES, CAPACITY,
            )  # fmt: skip
            is_listed = length <= CAPACITY
    if is_listed:
        keys = _listed(row_list, length, CAPACITY)
        weights = tl.where(by_count, 1.0, tl.exp(-_distance(keys)))
        high = _smallest_reaching(keys, weights, sum_before, bound, low, high, PIVOTS)
    return high


@triton.jit
def threshold_kernel(
    logits,
    row_stride,
    slots,
    inverse_temperatures,
    log_min_ps,
    top_ks,
    top_ps,
    maxima,
    minima,
    sums,
    lists,
    thresholds,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    ALL_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    STAGES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One program a row: write the largest key it keeps, `KEEP_ALL` for rows that truncate nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    is_greedy = inverse_temperature == 0.0
    scale = tl.where(is_greedy, 1.0, inverse_temperature)
    log_min_p = tl.load(log_min_ps + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = log_min_p > float("-inf")

    tiles = tl.arange(0, ALL_TILES)
    places = row * num_tiles + tiles
    is_tile = tiles < num_tiles
    tile_maxima = tl.load(maxima + places, mask=is_tile, other=float("-inf"))
    highest = tl.max(tile_maxima, axis=0)
    tile_keys = _key((highest - tile_maxima) * scale)
    total = tl.sum(tl.load(sums + places, mask=is_tile, other=0.0) * tl.exp(-_distance(tile_keys)), axis=0)
    threshold = KEEP_ALL
    is_distribution = (total > 0.0) & (total < float("inf"))
    if (has_top_k | has_min_p | has_top_p) & (is_greedy == 0) & is_distribution:
        row_logits = logits + row * row_stride
        row_maxima = maxima + row * num_tiles
        row_list = lists + row * CAPACITY
        # Everything up to the farthest finite token, less what `min_p` drops.
        lowest = tl.min(tl.load(minima + places, mask=is_tile, other=float("inf")), axis=0)
        high = _key((highest - lowest) * scale)
        if has_min_p:
            high = tl.minimum(high, _key(tl.maximum(0.0 - log_min_p, 0.0)))
        before_all = high * 0 - 1
        if has_top_k & (top_k <= num_tiles):
            # As many tokens as there are tiles with a maximum up to here lie up to here.
            ones = tl.full([ALL_TILES], 1.0, dtype=tl.float32)
            high = _smallest_reaching(tile_keys, ones, 0.0, top_k.to(tl.float32), before_all, high, PIVOTS)
        elif (has_top_k == 0) & (has_min_p == 0):
            # All tokens beyond weigh too little to matter, even if the whole vocabulary lay there.
            margin = tl.log(vocab_size / ((1.0 - top_p) * total)) + 0.01
            high = tl.minimum(high, _key(tl.maximum(margin, 0.01)))
        length = tl.sum((tile_keys <= high).to(tl.int32), axis=0)
        is_listed = length * TOKENS_PER_NEAR_TILE <= CAPACITY
        if is_listed:
            length = _list_keys(
                row_logits, row_maxima, row_list, highest, scale, before_all, high, vocab_size, num_tiles,
                TILE, ROWS, TILES, CAPACITY,
            )  # fmt: skip
            is_listed = length <= CAPACITY
        # First `top_k`, then `top_p`: from one list, if it holds all keys up to `high`.
        for phase in range(2):
            by_count = phase == 0
            if (by_count & has_top_k) | ((phase == 1) & has_top_p):
                if (phase == 1) & (has_top_k | has_min_p):
                    if is_listed:
                        keys = _listed(row_list, length, CAPACITY)
                        total = tl.sum(tl.where(keys <= high, tl.exp(-_distance(keys)), 0.0), axis=0)
                    else:
                        whole = tl.full([PIVOTS], 1, dtype=tl.int32) * high
                        _, masses = _sums_up_to(
                            row_logits, row_maxima, highest, scale, before_all, whole, high, vocab_size, num_tiles,
                            TILE, ROWS, TILES, PIVOTS, STAGES,
                        )  # fmt: skip
                        total = tl.max(masses, axis=0)
                bound = tl.where(by_count, top_k.to(tl.float32), top_p * total)
                high = _narrow(
                    row_logits, row_maxima, row_list, highest, scale, high, by_count, bound, is_listed, length,
                    vocab_size, num_tiles, TILE, ROWS, TILES, PIVOTS, STAGES, CAPACITY,
                )  # fmt: skip
        threshold = high
    tl.store(thresholds + row, threshold)
