# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton code that both paged attention kernels share: attention of packed query rows over tiles of the cache.

A program's query rows are the query tokens of one sequence times the query heads that share one KV head: row `r` is
token `r // group`, head `r % group` of the group. So one read of a key serves every head that needs it.
The softmax is kept online, in base 2. Source: Dao, arXiv 2307.08691, algorithm 1; Ringlein et al., arXiv 2511.11581.
Of a cache in eight bits the scale of a key multiplies its scores and the scale of a value its weights, so that what the
tensor cores multiply are the numbers of the cache themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Weights times the scales of values are in units of 1 / 64: the largest that float16 holds for any float16 value, since
# the smallest ones would be lost there otherwise.
WEIGHT_UNITS = tl.constexpr(64.0)


@triton.jit
def load_scales(
    scales_ptr,
    blocks,
    positions,
    context_len,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Return the scales of the keys and of the values at `positions`, fp32."""
    pairs_ptr = scales_ptr + blocks.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE) + positions % BLOCK_SIZE
    pairs = tl.load(pairs_ptr, mask=positions < context_len, other=0) if MASKED else tl.load(pairs_ptr)
    key_scales = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    value_scales = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return key_scales.to(tl.float32), value_scales.to(tl.float32)


# Tokens before its own that a row's mask speaks of, itself included: those before them are seen.
MASK_BITS = tl.constexpr(64)


@triton.jit
def is_seen(row_positions, positions, hidden, SLIDING_WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return which positions rows see, `[BLOCK_M, BLOCK_N]`; the arguments are those of `attend_tiles`."""
    if hidden is None:
        seen = positions[None, :] <= row_positions[:, None]
        if SLIDING_WINDOW > 0:
            seen = seen & (positions[None, :] > row_positions[:, None] - SLIDING_WINDOW)
        if CHUNK > 0:
            seen = seen & (positions[None, :] >= (row_positions // CHUNK * CHUNK)[:, None])
    else:
        tl.static_assert(CHUNK == 0, "masks say nothing of where chunks begin")
        distance = row_positions[:, None] - positions[None, :]
        word = tl.where(distance < 32, hidden.to(tl.int32)[:, None], (hidden >> 32).to(tl.int32)[:, None])
        is_hidden = (word >> (distance & 31)) & 1
        seen = (distance >= 0) & ((distance >= MASK_BITS) | (is_hidden == 0))
        if SLIDING_WINDOW > 0:
            num_hidden = tl.sum(((hidden[:, None] >> tl.arange(0, MASK_BITS)[None, :]) & 1).to(tl.int32), 1)
            seen = seen & (distance < SLIDING_WINDOW + num_hidden[:, None])
    return seen


@triton.jit
def load_heads(cache_ptr, offsets, dims, is_cached, SIZE: tl.constexpr, END: tl.constexpr):
    """Return the numbers `dims` of the heads at `offsets`, `[BLOCK_N, len(dims)]`; zeros from SIZE on.

    `is_cached` is None where all of the tokens are in the cache; END is the first number behind `dims`.
    """
    pointers = cache_ptr + offsets[:, None] + dims[None, :]
    mask = None
    if is_cached is not None:
        mask = is_cached[:, None]
        if SIZE < END:
            mask = mask & (dims < SIZE)[None, :]
    elif SIZE < END:
        mask = (dims < SIZE)[None, :]
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_rest(query_ptr, query_offsets, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return what `attend_tiles` takes as `query_rest`, of the heads that begin at `query_offsets`."""
    rest = None
    if BLOCK_R > 0:
        dims = BLOCK_D + tl.arange(0, BLOCK_R)
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        rest = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    return rest


@triton.jit
def begin_rows(sinks_ptr, heads, is_row, split):
    """Return maximum and sum of rows that have seen nothing yet, but for the sinks in the first split."""
    row_max = tl.full(heads.shape, float("-inf"), tl.float32)
    row_sum = tl.zeros(heads.shape, tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_row & (split == 0), other=float("-inf"))
        row_max = sinks * 1.4426950408889634
        row_sum = tl.where(sinks > float("-inf"), 1.0, 0.0)
    return row_max, row_sum


@triton.jit
def first_visible(position, REACH: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first token that a query at `position`, and those behind it, may see."""
    first = position * 0
    if REACH > 0:
        first = tl.maximum(position - REACH + 1, first)
    if CHUNK > 0:
        first = tl.maximum(tl.maximum(position, 0) // CHUNK * CHUNK, first)
    return first


@triton.jit
def attend_tiles(
    query,
    query_rest,
    accumulator,
    row_max,
    row_sum,
    key_ptr,
    value_ptr,
    scales_ptr,
    table_ptr,
    first_tile,
    end_tile,
    row_positions,
    hidden,
    context_len,
    score_scale,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_LATENT: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Fold the tiles `first_tile : end_tile` of a sequence's cached tokens into the running softmax of the rows.

    Args:
        query: `[BLOCK_M, BLOCK_D]`, zero beyond the head, of the type to multiply in.
        query_rest: `[BLOCK_M, BLOCK_R]`, the numbers of the head behind those; None where there are none.
        accumulator: `[BLOCK_M, BLOCK_V]` fp32, before `finish_rows`.
        row_max: `[BLOCK_M]` fp32, in units of log2; -inf before the first visible token.
        row_sum: `[BLOCK_M]` fp32.
        key_ptr: The key cache, at this program's KV head.
        value_ptr: The value cache, likewise.
        scales_ptr: Pairs of scales, each read as one int32, likewise; None where the cache is not in eight bits.
        table_ptr: The sequence's row of the block table.
        first_tile: In units of BLOCK_N tokens.
        end_tile: Likewise.
        row_positions: `[BLOCK_M]` int32, position of each row's token in its sequence; -1 for a row that is padding.
        hidden: `[BLOCK_M]` int64, of each row the tokens that it does not see: bit `i` is the one `i` before its own;
            None where rows see all before them.
        context_len: Tokens in the cache; beyond them nothing is read.
        score_scale: With a soft cap, what the scores are multiplied with before tanh; else their scale times log2(e).
        MASKED: False where every row sees every token of the tiles.
        BLOCK_SIZE: Tokens per block.
        NUM_KV_HEADS: Of the cache.
        KEY_BLOCK: Elements from the keys of one block to those of the next.
        KEY_TOKEN: Elements from the key of one token to that of the next.
        VALUE_BLOCK: As of keys.
        VALUE_TOKEN: As of keys.
        HEAD_DIM: Elements of a key, at most BLOCK_D + BLOCK_R.
        VALUE_DIM: Elements of a value, at most BLOCK_V.
        IS_LATENT: Values are the first elements of the keys, and are not read again; BLOCK_V is BLOCK_D.
        SLIDING_WINDOW: Tokens that a row sees, its own included; 0 is unlimited.
        CHUNK: Tokens of the chunks that no row sees beyond; 0 is unlimited.
        SOFT_CAP: Bound of the scores; 0 is none.
        PRECISION: Of the products, as `tl.dot` names it.
        BLOCK_N: Tokens per tile.
        BLOCK_D: Power of two, as the next two.
        BLOCK_V: Of values.
        BLOCK_R: Of what of a key is behind BLOCK_D; 0 is nothing.
    """
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for tile in tl.range(first_tile, end_tile):
        positions = tile * BLOCK_N + offsets
        if MASKED:
            # A tile may reach beyond the context, where table and cache hold anything.
            is_cached = positions < context_len
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_cached, other=0)
        else:
            is_cached = None
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        key_offsets = blocks.to(tl.int64) * KEY_BLOCK + positions % BLOCK_SIZE * KEY_TOKEN
        key = load_heads(key_ptr, key_offsets, dims, is_cached, HEAD_DIM, BLOCK_D)
        if IS_LATENT:
            value = key
        else:
            value_offsets = blocks.to(tl.int64) * VALUE_BLOCK + positions % BLOCK_SIZE * VALUE_TOKEN
            value = load_heads(value_ptr, value_offsets, value_dims, is_cached, VALUE_DIM, BLOCK_V)
        score_scales = score_scale
        if scales_ptr is not None:
            key_scales, value_scales = load_scales(
                scales_ptr, blocks, positions, context_len, MASKED, BLOCK_SIZE, NUM_KV_HEADS
            )
            score_scales = (key_scales * score_scale)[None, :]

        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
        if query_rest is not None:
            rest_dims = BLOCK_D + tl.arange(0, BLOCK_R)
            rest = load_heads(key_ptr, key_offsets, rest_dims, is_cached, HEAD_DIM, BLOCK_D + BLOCK_R)
            scores = tl.dot(query_rest, tl.trans(rest.to(query.dtype)), scores, input_precision=PRECISION)
        scores *= score_scales
        if SOFT_CAP > 0:
            # tanh by way of a decaying exponential, which cannot overflow; 2.885 = 2 log2(e).
            decay = tl.exp2(tl.abs(scores) * -2.8853900817779268)
            capped = (1.0 - decay) / (1.0 + decay) * (SOFT_CAP * 1.4426950408889634)
            scores = tl.where(scores < 0, -capped, capped)
        if MASKED:
            is_visible = is_seen(row_positions, positions, hidden, SLIDING_WINDOW, CHUNK)
            scores = tl.where(is_visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: exp2(-inf - 0) is the zero it needs, exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        if scales_ptr is not None:
            weights *= (value_scales * WEIGHT_UNITS)[None, :]
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(weights.to(query.dtype), value.to(query.dtype), accumulator, input_precision=PRECISION)
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def load_hidden(tree_masks_ptr, rows, is_row):
    """Return what `attend_tiles` takes as `hidden`."""
    hidden = None
    if tree_masks_ptr is not None:
        hidden = ~tl.load(tree_masks_ptr + rows, mask=is_row, other=-1)
    return hidden


@triton.jit
def finish_rows(accumulator, row_sum, scales_ptr):
    """Return the attended values; a row that sees no token has the sum 0 and the result 0."""
    if scales_ptr is not None:
        accumulator *= 1.0 / WEIGHT_UNITS
    return accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]


@triton.jit
def log_sum(row_max, row_sum):
    """Return log2 of each row's sum of exponentials; -inf for a row that sees no token."""
    return tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))


@triton.jit
def combine_splits(
    partial_ptr,
    partial_lse_ptr,
    first_row,
    row_stride,
    num_written,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return a row's result `[BLOCK_D]`, its splits weighted by their sums of exponentials.

    Args:
        partial_ptr: Results of splits, fp32, HEAD_DIM elements a row.
        partial_lse_ptr: What `log_sum` returned of them.
        first_row: Where the first split's row lies.
        row_stride: Rows from one split to the next.
        num_written: Splits that there are, at most BLOCK_S.
        HEAD_DIM: Elements of a head, at most BLOCK_D.
        BLOCK_S: Power of two.
        BLOCK_D: Power of two.
    """
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    is_written = splits < num_written
    rows = first_row + splits.to(tl.int64) * row_stride
    lse = tl.load(partial_lse_ptr + rows, mask=is_written, other=float("-inf"))
    mask = is_written[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    return tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
