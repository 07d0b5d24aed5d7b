# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for decodes: few query tokens per sequence, the cached tokens divided among programs (split-KV).

The grid depends only on the sizes of the tensors. How many splits a sequence gets is decided on the device, by its
share of the batch's tokens: one long context among many short ones gets nearly all. A second kernel reduces the splits.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Ringlein et al., arXiv 2511.11581, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import wait_for_inputs
from kernels.paged_attention.triton_tiles import (
    CachedHead,
    QueryRows,
    attend_tiles,
    begin_rows,
    combine_splits,
    finish_rows,
    first_visible,
    load_query,
    log_sum,
    num_cached,
    store_lse,
    store_rows,
)


@triton.jit
def divide_sequences(
    query_starts_ptr,
    context_lens_ptr,
    num_seqs,
    num_shares,
    MAX_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Divide the tiles of all sequences into splits of about equal length, however unlike their contexts are.

    A split has the batch's tiles divided by `num_shares`, or more where that is below MIN_TILES or a sequence would
    have more than MAX_SPLITS. An attended sequence has one at least, so all have at most `num_shares + num_seqs`.

    Shapes:
        result: Tiles that a split takes, and how many splits there are, each `[SEQS]`; no splits of sequences without
            query tokens, or with more than MAX_QUERY_LEN.
    """
    sequences = tl.arange(0, SEQS)
    is_sequence = sequences < num_seqs
    first_rows = tl.load(query_starts_ptr + sequences, mask=is_sequence, other=0)
    query_lens = tl.load(query_starts_ptr + sequences + 1, mask=is_sequence, other=0) - first_rows
    context_lens = tl.load(context_lens_ptr + sequences, mask=is_sequence, other=0)
    is_attended = (query_lens > 0) & (query_lens <= MAX_QUERY_LEN)
    first_seen = first_visible(context_lens - query_lens, SHAPE.sliding_window, SHAPE.chunk)
    first_tiles = num_cached(first_seen, SHAPE) // BLOCK_N
    tiles = tl.where(is_attended, tl.cdiv(num_cached(context_lens, SHAPE), BLOCK_N) - first_tiles, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_shares), MIN_TILES)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, MAX_SPLITS), share)
    # An empty context has a split, which writes zeros.
    splits = tl.where(is_attended, tl.maximum(tl.cdiv(tiles, tiles_per_split), 1), 0)
    return tiles_per_split, splits


@triton.jit
def as_operand(query, key_ptr):
    """Return the query in the type that keys, weights and values are converted to.

    One instruction makes float16 of fp8, where bfloat16 takes three: a decode multiplies what it converts only once.
    """
    if key_ptr.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit(do_not_specialize=["num_seqs", "num_shares"])
def split_attention_kernel(
    result_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    scales_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    sinks_ptr,
    score_scale,
    query_stride,
    table_stride,
    key_head_stride,
    value_head_stride,
    num_seqs,
    num_shares,
    MAX_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend from the queries of one sequence and KV head to one split of its tokens.

    Grid: `(num_kv_heads, num_seqs + num_shares)`; a program finds its sequence and split by `divide_sequences`.
    Sequences with more than MAX_QUERY_LEN query tokens are left alone. Of a sequence with one split the result is
    written, else for each row a partial result and the log2 of its sum of exponentials.
    """
    wait_for_inputs()
    kv_head, item = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    tiles_per_split, splits = divide_sequences(
        query_starts_ptr,
        context_lens_ptr,
        num_seqs,
        num_shares,
        MAX_QUERY_LEN,
        MIN_TILES,
        MAX_SPLITS,
        SEQS,
        BLOCK_N,
        SHAPE,
    )
    ends = tl.cumsum(splits, 0)
    is_before = ends <= item
    sequence = tl.sum(is_before.to(tl.int32), 0)
    if sequence >= num_seqs:
        return
    is_own = tl.arange(0, SEQS) == sequence
    split = item - tl.sum(tl.where(is_before, splits, 0), 0)
    own_tiles = tl.sum(tl.where(is_own, tiles_per_split, 0), 0)
    is_whole = tl.sum(tl.where(is_own, splits, 0), 0) == 1
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    num_tokens = num_cached(context_len, SHAPE)
    first_seen = first_visible(context_len - query_len, SHAPE.sliding_window, SHAPE.chunk)
    first_tile = num_cached(first_seen, SHAPE) // BLOCK_N + split * own_tiles
    end_tile = tl.minimum(first_tile + own_tiles, tl.cdiv(num_tokens, BLOCK_N))

    local_rows = tl.arange(0, BLOCK_M)
    tokens = local_rows // SHAPE.group
    is_row = tokens < query_len
    heads = kv_head * SHAPE.group + local_rows % SHAPE.group
    token_rows = (first_row + tokens).to(tl.int64)
    query_offsets = token_rows * query_stride + heads * SHAPE.key_dim
    rest = load_query(query_ptr, query_offsets, is_row, SHAPE.key_dim, SHAPE.block_d, SHAPE.block_r)
    rows = QueryRows(
        as_operand(load_query(query_ptr, query_offsets, is_row, SHAPE.key_dim, 0, SHAPE.block_d), key_ptr),
        None if rest is None else as_operand(rest, key_ptr),
        tl.where(is_row, context_len - query_len + tokens, -1),
    )
    cached_head = (kv_head // SHAPE.num_parts).to(tl.int64)
    key_ptr += cached_head * key_head_stride
    value_ptr += cached_head * value_head_stride
    if scales_ptr is not None:
        scales_ptr += cached_head * SHAPE.block_size
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    head = CachedHead(key_ptr, value_ptr, scales_ptr, table_ptr, num_tokens)
    BLOCK_V: tl.constexpr = SHAPE.block_v
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max, row_sum = begin_rows(sinks_ptr, heads, is_row, split)
    accumulator, row_max, row_sum = attend_tiles(
        rows, accumulator, row_max, row_sum, head, first_tile, end_tile, score_scale, True, BLOCK_N, SHAPE
    )
    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if is_whole:
        result_rows = (first_row + tokens).to(tl.int64) * num_kv_heads * SHAPE.group + heads
        store_rows(result_ptr, result_rows, is_row, accumulator, SHAPE.value_dim)
        store_lse(lse_ptr, result_rows, is_row, log_sum(row_max, row_sum))
    else:
        ROWS: tl.constexpr = SHAPE.group * MAX_QUERY_LEN
        partial_rows = (tl.program_id(1).to(tl.int64) * num_kv_heads + kv_head) * ROWS + local_rows
        store_rows(partial_ptr, partial_rows, is_row, accumulator, SHAPE.value_dim)
        tl.store(partial_lse_ptr + partial_rows, log_sum(row_max, row_sum), mask=is_row)


@triton.jit(do_not_specialize=["num_seqs", "num_shares"])
def reduce_splits_kernel(
    result_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_seqs,
    num_shares,
    MAX_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Combine the splits of one query row, `grid: (num_seqs, num_kv_heads * group * MAX_QUERY_LEN)`."""
    wait_for_inputs()
    ROWS: tl.constexpr = SHAPE.group * MAX_QUERY_LEN
    sequence, kv_head, row = tl.program_id(0), tl.program_id(1) // ROWS, tl.program_id(1) % ROWS
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    if (query_len > MAX_QUERY_LEN) | (row // SHAPE.group >= query_len):
        return
    _, splits = divide_sequences(
        query_starts_ptr,
        context_lens_ptr,
        num_seqs,
        num_shares,
        MAX_QUERY_LEN,
        MIN_TILES,
        MAX_SPLITS,
        SEQS,
        BLOCK_N,
        SHAPE,
    )
    sequences = tl.arange(0, SEQS)
    num_splits = tl.sum(tl.where(sequences == sequence, splits, 0), 0)
    if num_splits <= 1:
        return
    first_item = tl.sum(tl.where(sequences < sequence, splits, 0), 0)
    num_kv_heads = tl.num_programs(1) // ROWS
    stride = num_kv_heads * ROWS
    first_split = first_item.to(tl.int64) * stride + kv_head * ROWS + row
    combined, lse = combine_splits(partial_ptr, partial_lse_ptr, first_split, stride, num_splits, MAX_SPLITS, SHAPE)
    dims = tl.arange(0, SHAPE.block_v)
    head = kv_head * SHAPE.group + row % SHAPE.group
    result_row = (first_row + row // SHAPE.group).to(tl.int64) * num_kv_heads * SHAPE.group + head
    combined = combined.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + result_row * SHAPE.value_dim + dims, combined, mask=dims < SHAPE.value_dim)
    store_lse(lse_ptr, result_row, row < ROWS, lse)
