# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for decodes: few query tokens per sequence, the cached tokens divided among programs (split-KV).

The grid depends only on the sizes of the tensors; contexts are read on the device. A second kernel reduces the splits.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Ringlein et al., arXiv 2511.11581, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.triton_tiles import (
    CachedHead,
    QueryRows,
    attend_tiles,
    begin_rows,
    combine_splits,
    finish_rows,
    first_visible,
    load_hidden,
    load_query,
    log_sum,
    store_rows,
)


@triton.jit
def split_tiles(
    context_len,
    query_len,
    num_splits,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Return the first tile that a sequence's queries see, the end of its tiles, and how many each split takes."""
    first_tile = first_visible(context_len - query_len, SHAPE.reach, SHAPE.chunk) // BLOCK_N
    end_tile = tl.cdiv(context_len, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), MIN_TILES)
    return first_tile, end_tile, tiles_per_split


@triton.jit
def as_operand(query, key_ptr):
    """Return the query in the type that keys, weights and values are converted to.

    One instruction makes float16 of fp8, where bfloat16 takes three: a decode multiplies what it converts only once.
    """
    if key_ptr.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit(do_not_specialize=["num_splits"])
def split_attention_kernel(
    result_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    scales_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tree_masks_ptr,
    sinks_ptr,
    score_scale,
    query_stride,
    table_stride,
    num_splits,
    MAX_QUERY_LEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend from the queries of one sequence and KV head to one split of its tokens.

    Grid: `(num_kv_heads, num_splits, num_seqs)`. Sequences with more than MAX_QUERY_LEN query tokens are left alone.
    Unless IS_SPLIT the result is written, else for each row a partial result and the log2 of its sum of exponentials.
    """
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    if (query_len == 0) | (query_len > MAX_QUERY_LEN):
        return
    first_tile, end_tile, tiles_per_split = split_tiles(context_len, query_len, num_splits, MIN_TILES, BLOCK_N, SHAPE)
    first_tile += split * tiles_per_split
    # The first split always writes, so that an empty context yields zeros.
    if (split > 0) & (first_tile >= end_tile):
        return
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

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
        load_hidden(tree_masks_ptr, token_rows, is_row),
    )
    key_ptr += kv_head // SHAPE.num_parts * SHAPE.key_head
    value_ptr += kv_head // SHAPE.num_parts * SHAPE.value_head
    if scales_ptr is not None:
        scales_ptr += kv_head // SHAPE.num_parts * SHAPE.block_size
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    head = CachedHead(key_ptr, value_ptr, scales_ptr, table_ptr, context_len)
    BLOCK_V: tl.constexpr = SHAPE.block_v
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max, row_sum = begin_rows(sinks_ptr, heads, is_row, split)
    accumulator, row_max, row_sum = attend_tiles(
        rows, accumulator, row_max, row_sum, head, first_tile, end_tile, score_scale, True, BLOCK_N, SHAPE
    )
    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if IS_SPLIT:
        ROWS: tl.constexpr = SHAPE.group * MAX_QUERY_LEN
        partial_rows = ((sequence.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * num_splits + split) * ROWS + local_rows
        store_rows(partial_ptr, partial_rows, is_row, accumulator, SHAPE.value_dim)
        tl.store(partial_lse_ptr + partial_rows, log_sum(row_max, row_sum), mask=is_row)
    else:
        result_rows = token_rows * SHAPE.num_kv_heads * SHAPE.group + heads
        store_rows(result_ptr, result_rows, is_row, accumulator, SHAPE.value_dim)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits_kernel(
    result_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_splits,
    MAX_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Combine the splits of one query row, `grid: (num_kv_heads * group * MAX_QUERY_LEN, num_seqs)`."""
    ROWS: tl.constexpr = SHAPE.group * MAX_QUERY_LEN
    kv_head, row, sequence = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS, tl.program_id(1)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    if (query_len > MAX_QUERY_LEN) | (row // SHAPE.group >= query_len):
        return
    first_tile, end_tile, tiles_per_split = split_tiles(context_len, query_len, num_splits, MIN_TILES, BLOCK_N, SHAPE)
    num_written = tl.maximum(tl.cdiv(end_tile - first_tile, tiles_per_split), 1)
    first_split = (sequence.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * num_splits * ROWS + row
    combined = combine_splits(partial_ptr, partial_lse_ptr, first_split, ROWS, num_written, BLOCK_S, SHAPE)
    dims = tl.arange(0, SHAPE.block_v)
    head = kv_head * SHAPE.group + row % SHAPE.group
    result_row = (first_row + row // SHAPE.group).to(tl.int64) * SHAPE.num_kv_heads * SHAPE.group + head
    combined = combined.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + result_row * SHAPE.value_dim + dims, combined, mask=dims < SHAPE.value_dim)
