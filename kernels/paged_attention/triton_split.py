# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for decodes: few query tokens per sequence, the cached tokens divided among programs (split-KV).

The grid depends only on the sizes of the tensors; contexts are read on the device. A second kernel reduces the splits.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Ringlein et al., arXiv 2511.11581, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.triton_tiles import attend_tiles, combine_splits, finish_rows, load_hidden, log_sum


@triton.jit
def split_tiles(
    context_len,
    query_len,
    num_splits,
    REACH: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first tile that a sequence's queries see, the end of its tiles, and how many each split takes."""
    first_tile = 0
    if REACH > 0:
        first_tile = tl.maximum(context_len - query_len + 1 - REACH, 0) // BLOCK_N
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
    score_scale,
    query_stride,
    table_stride,
    num_splits,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    first_tile, end_tile, tiles_per_split = split_tiles(context_len, query_len, num_splits, REACH, MIN_TILES, BLOCK_N)
    first_tile += split * tiles_per_split
    # The first split always writes, so that an empty context yields zeros.
    if (split > 0) & (first_tile >= end_tile):
        return
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = rows // GROUP
    is_row = tokens < query_len
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    result_rows = (first_row + tokens).to(tl.int64)
    query_offsets = (result_rows * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    query = as_operand(tl.load(query_ptr + query_offsets, mask=mask, other=0.0), key_ptr)
    if scales_ptr is not None:
        scales_ptr += kv_head * BLOCK_SIZE
    accumulator, row_max, row_sum = attend_tiles(
        query,
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        key_ptr + kv_head * HEAD_DIM,
        value_ptr + kv_head * HEAD_DIM,
        scales_ptr,
        block_tables_ptr + sequence.to(tl.int64) * table_stride,
        first_tile,
        end_tile,
        tl.where(is_row, context_len - query_len + tokens, -1),
        load_hidden(tree_masks_ptr, result_rows, is_row),
        context_len,
        score_scale,
        True,
        BLOCK_SIZE,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        SLIDING_WINDOW,
        SOFT_CAP,
        PRECISION,
        BLOCK_N,
        BLOCK_D,
    )
    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if IS_SPLIT:
        ROWS: tl.constexpr = GROUP * MAX_QUERY_LEN
        partial_row = ((sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_splits + split) * ROWS + rows
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=mask)
        tl.store(partial_lse_ptr + partial_row, log_sum(row_max, row_sum), mask=is_row)
    else:
        result_offsets = ((result_rows * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(result_ptr + result_offsets, accumulator.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits_kernel(
    result_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_splits,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    REACH: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine the splits of one query row, `grid: (NUM_KV_HEADS * GROUP * MAX_QUERY_LEN, num_seqs)`."""
    ROWS: tl.constexpr = GROUP * MAX_QUERY_LEN
    kv_head, row, sequence = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS, tl.program_id(1)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    if (query_len > MAX_QUERY_LEN) | (row // GROUP >= query_len):
        return
    first_tile, end_tile, tiles_per_split = split_tiles(context_len, query_len, num_splits, REACH, MIN_TILES, BLOCK_N)
    num_written = tl.maximum(tl.cdiv(end_tile - first_tile, tiles_per_split), 1)

    sequence_row = (sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_splits * ROWS
    combined = combine_splits(
        partial_ptr, partial_lse_ptr, sequence_row + row, ROWS, num_written, HEAD_DIM, BLOCK_S, BLOCK_D
    )
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row % GROUP
    result_row = (first_row + row // GROUP).to(tl.int64) * NUM_KV_HEADS * GROUP + head
    tl.store(result_ptr + result_row * HEAD_DIM + dims, combined.to(result_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
