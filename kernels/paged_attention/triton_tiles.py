# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton code that both paged attention kernels share: attention of packed query rows over tiles of the cache.

A program's query rows are the query tokens of one sequence times the query heads that share one KV head: row `r` is
token `r // group`, head `r % group` of the group. So one read of a key serves every head that needs it.
The softmax is kept online, in base 2. Source: Dao, arXiv 2307.08691, algorithm 1; Ringlein et al., arXiv 2511.11581.
Of a cache in eight bits the scale of a key multiplies its scores and the scale of a value its weights, so that what the
tensor cores multiply are the numbers of the cache themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Weights times the scales of values are in units of 1 / 64: the largest that float16 holds for any float16 value, since
# the smallest ones would be lost there otherwise.
WEIGHT_UNITS = tl.constexpr(64.0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Facts about a call that are known when its kernels are compiled; they take it as the constant SHAPE.

    Attributes:
        group: Query heads that share a KV head and are taken at once.
        num_parts: In how many parts the query heads of a KV head are taken, each by programs of its own.
        key_dim: Elements of a key, at most `block_d + block_r`.
        value_dim: Elements of a value, at most `block_v`.
        key_block, key_token: Elements from the keys of one block and token to those of the next. From one head to the
            next it may be as far as a step has tokens, so the kernels take that as an argument.
        value_block, value_token: Likewise of values.
        scale_block: Pairs of scales from one block to the next.
        is_latent: Values are the first elements of the keys, and are not read again; `block_v` is `block_d`.
        block_size: Tokens per block.
        sliding_window: Tokens that a row sees, its own included; 0 is unlimited.
        chunk: Tokens of the chunks that no row sees beyond; 0 is unlimited.
        soft_cap: Bound of the scores; 0 is none.
        precision: Of the products, as `tl.dot` names it.
        block_d: Power of two, as the next two.
        block_v: Of values.
        block_r: Of what of a key is behind `block_d`; 0 is nothing.
        first, step: The cache has every `step`th token of a sequence, from `first` on.
    """

    group: int
    num_parts: int
    key_dim: int
    value_dim: int
    key_block: int
    key_token: int
    value_block: int
    value_token: int
    scale_block: int
    is_latent: bool
    block_size: int
    sliding_window: int
    chunk: int
    soft_cap: float
    precision: str
    block_d: int
    block_v: int
    block_r: int
    first: int
    step: int


class QueryRows(NamedTuple):
    """The packed query rows of a program.

    Attributes:
        query: `[BLOCK_M, block_d]`, zero beyond the head, of the type to multiply in.
        rest: `[BLOCK_M, block_r]`, the numbers of the head behind those; None where there are none.
        positions: `[BLOCK_M]` int32, position of each row's token in its sequence; -1 for a row that is padding.
    """

    query: Any
    rest: Any
    positions: Any


class CachedHead(NamedTuple):
    """The cached tokens of a sequence in one KV head.

    Attributes:
        key_ptr: The key cache, at the head.
        value_ptr: The value cache, likewise.
        scales_ptr: Pairs of scales, each read as one int32, likewise; None where the cache is not in eight bits.
        table_ptr: The sequence's row of the block table.
        context_len: Tokens of the sequence in the cache; beyond them nothing is read.
    """

    key_ptr: Any
    value_ptr: Any
    scales_ptr: Any
    table_ptr: Any
    context_len: Any


@triton.jit
def load_scales(head, blocks, places, MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """Return the scales of the keys and of the values at `places`, fp32."""
    pairs_ptr = head.scales_ptr + blocks.to(tl.int64) * SHAPE.scale_block + places % SHAPE.block_size
    pairs = tl.load(pairs_ptr, mask=places < head.context_len, other=0) if MASKED else tl.load(pairs_ptr)
    key_scales = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    value_scales = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return key_scales.to(tl.float32), value_scales.to(tl.float32)


@triton.jit
def num_cached(num_tokens, SHAPE: tl.constexpr):
    """Return how many of the first tokens of a sequence are in the cache."""
    count = num_tokens
    if SHAPE.step > 1:
        count = (num_tokens - SHAPE.first + SHAPE.step - 1) // SHAPE.step
    return count


@triton.jit
def is_seen(rows, places, SHAPE: tl.constexpr):
    """Return which tokens, by their places in the cache, `QueryRows` see; `[BLOCK_M, BLOCK_N]`."""
    positions = places
    if SHAPE.step > 1:
        positions = places * SHAPE.step + SHAPE.first
    seen = positions[None, :] <= rows.positions[:, None]
    if SHAPE.sliding_window > 0:
        seen = seen & (positions[None, :] > rows.positions[:, None] - SHAPE.sliding_window)
    if SHAPE.chunk > 0:
        seen = seen & (positions[None, :] >= (rows.positions // SHAPE.chunk * SHAPE.chunk)[:, None])
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
def load_query(query_ptr, offsets, is_row, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers `FIRST : FIRST + BLOCK` of the heads that begin at `offsets`; None of no numbers."""
    numbers = None
    if BLOCK > 0:
        dims = FIRST + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        numbers = tl.load(query_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    return numbers


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
    rows,
    accumulator,
    row_max,
    row_sum,
    head,
    first_tile,
    end_tile,
    score_scale,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Fold the tiles `first_tile : end_tile` of a sequence's cached tokens into the running softmax of the rows.

    Args:
        rows: `QueryRows`.
        accumulator: `[BLOCK_M, block_v]` fp32, before `finish_rows`.
        row_max: `[BLOCK_M]` fp32, in units of log2; -inf before the first visible token.
        row_sum: `[BLOCK_M]` fp32.
        head: `CachedHead`.
        first_tile: In units of BLOCK_N tokens.
        end_tile: Likewise.
        score_scale: With a soft cap, what the scores are multiplied with before tanh; else their scale times log2(e).
        MASKED: False where every row sees every token of the tiles.
        BLOCK_N: Tokens per tile.
        SHAPE: `AttentionShape`.
    """
    dtype: tl.constexpr = rows.query.dtype
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, SHAPE.block_d)
    value_dims = tl.arange(0, SHAPE.block_v)
    for tile in tl.range(first_tile, end_tile):
        places = tile * BLOCK_N + offsets
        if MASKED:
            # A tile may reach beyond the context, where table and cache hold anything.
            is_cached = places < head.context_len
            blocks = tl.load(head.table_ptr + places // SHAPE.block_size, mask=is_cached, other=0)
        else:
            is_cached = None
            blocks = tl.load(head.table_ptr + places // SHAPE.block_size)
        key_offsets = blocks.to(tl.int64) * SHAPE.key_block + places % SHAPE.block_size * SHAPE.key_token
        key = load_heads(head.key_ptr, key_offsets, dims, is_cached, SHAPE.key_dim, SHAPE.block_d)
        if SHAPE.is_latent:
            value = key
        else:
            value_offsets = blocks.to(tl.int64) * SHAPE.value_block + places % SHAPE.block_size * SHAPE.value_token
            value = load_heads(head.value_ptr, value_offsets, value_dims, is_cached, SHAPE.value_dim, SHAPE.block_v)
        score_scales = score_scale
        if head.scales_ptr is not None:
            key_scales, value_scales = load_scales(head, blocks, places, MASKED, SHAPE)
            score_scales = (key_scales * score_scale)[None, :]

        scores = tl.dot(rows.query, tl.trans(key.to(dtype)), input_precision=SHAPE.precision)
        if rows.rest is not None:
            rest_dims = SHAPE.block_d + tl.arange(0, SHAPE.block_r)
            end_of_rest: tl.constexpr = SHAPE.block_d + SHAPE.block_r
            rest = load_heads(head.key_ptr, key_offsets, rest_dims, is_cached, SHAPE.key_dim, end_of_rest)
            scores = tl.dot(rows.rest, tl.trans(rest.to(dtype)), scores, input_precision=SHAPE.precision)
        scores *= score_scales
        if SHAPE.soft_cap > 0:
            # tanh by way of a decaying exponential, which cannot overflow; 2.885 = 2 log2(e).
            decay = tl.exp2(tl.abs(scores) * -2.8853900817779268)
            capped = (1.0 - decay) / (1.0 + decay) * (SHAPE.soft_cap * 1.4426950408889634)
            scores = tl.where(scores < 0, -capped, capped)
        if MASKED:
            scores = tl.where(is_seen(rows, places, SHAPE), scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: exp2(-inf - 0) is the zero it needs, exp2(-inf - -inf) would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        if head.scales_ptr is not None:
            weights *= (value_scales * WEIGHT_UNITS)[None, :]
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(weights.to(dtype), value.to(dtype), accumulator, input_precision=SHAPE.precision)
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def finish_rows(accumulator, row_sum, scales_ptr):
    """Return the attended values; a row that sees no token has the sum 0 and the result 0."""
    if scales_ptr is not None:
        accumulator *= 1.0 / WEIGHT_UNITS
    return accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]


@triton.jit
def store_lse(lse_ptr, target_rows, is_row, lse):
    """Store logs of sums of exponentials, in units of log2, as natural ones; None stores nothing."""
    if lse_ptr is not None:
        tl.store(lse_ptr + target_rows, lse * 0.6931471805599453, mask=is_row)


@triton.jit
def log_sum(row_max, row_sum):
    """Return log2 of each row's sum of exponentials; -inf for a row that sees no token."""
    return tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))


@triton.jit
def store_rows(target_ptr, target_rows, is_row, values, VALUE_DIM: tl.constexpr):
    """Store the values of packed rows at rows of VALUE_DIM elements, in the type of the target."""
    dims = tl.arange(0, values.shape[1])
    mask = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    offsets = (target_rows * VALUE_DIM)[:, None] + dims[None, :]
    tl.store(target_ptr + offsets, values.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_splits(
    partial_ptr, partial_lse_ptr, first_split, split_stride, num_written, BLOCK_S: tl.constexpr, SHAPE: tl.constexpr
):
    """Return a row's result `[block_v]`, those of its splits weighted by their sums of exponentials, and `log_sum`.

    Args:
        partial_ptr: Results of splits, fp32, as many elements a row as a value has.
        partial_lse_ptr: What `log_sum` returned of them.
        first_split: Row of the first split's result.
        split_stride: Rows from one split to the next.
        num_written: Splits that there are, at most BLOCK_S.
        BLOCK_S: Power of two.
        SHAPE: `AttentionShape`.
    """
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, SHAPE.block_v)
    is_written = splits < num_written
    rows = first_split + splits.to(tl.int64) * split_stride
    lse = tl.load(partial_lse_ptr + rows, mask=is_written, other=float("-inf"))
    mask = is_written[:, None] & (dims < SHAPE.value_dim)[None, :]
    partial = tl.load(partial_ptr + rows[:, None] * SHAPE.value_dim + dims[None, :], mask=mask, other=0.0)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    return tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0), log_sum(top, total)
