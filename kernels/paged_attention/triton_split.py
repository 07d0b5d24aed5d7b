# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for decodes: few query tokens per sequence, the cached tokens divided among programs (split-KV).

The grid depends only on the sizes of the tensors; contexts are read on the device. A second kernel reduces the splits.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Ringlein et al., arXiv 2511.11581, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.triton_tiles import (
    attend_tiles,
    begin_rows,
    combine_splits,
    finish_rows,
    first_visible,
    load_hidden,
    load_rest,
    log_sum,
)


@triton.jit
def split_tiles(
    context_len,
    query_len,
    num_splits,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first tile that a sequence's queries see, the end of its tiles, and how many each split takes."""
    first_tile = first_visible(context_len - query_len, REACH, CHUNK) // BLOCK_N
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
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    IS_LATENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend from the queries of one sequence and KV head to one split of its tokens.

    Grid: `(num_kv_heads, num_splits, num_seqs)`, where a KV head that more query heads share than are taken at once
    counts as PARTS of them. Sequences with more than MAX_QUERY_LEN query tokens are left alone.
    Unless IS_SPLIT the result is written, else for each row a partial result and the log2 of its sum of exponentials.
    """
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    if (query_len == 0) | (query_len > MAX_QUERY_LEN):
        return
    first_tile, end_tile, tiles_per_split = split_tiles(
        context_len, query_len, num_splits, REACH, CHUNK, MIN_TILES, BLOCK_N
    )
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
    value_dims = tl.arange(0, BLOCK_V)
    value_mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    result_rows = (first_row + tokens).to(tl.int64)
    query_offsets = result_rows * query_stride + heads * HEAD_DIM
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    query = as_operand(query, key_ptr)
    rest = load_rest(query_ptr, query_offsets, is_row, HEAD_DIM, BLOCK_D, BLOCK_R)
    if rest is not None:
        rest = as_operand(rest, key_ptr)
    row_max, row_sum = begin_rows(sinks_ptr, heads, is_row, split)
    if scales_ptr is not None:
        scales_ptr += kv_head // PARTS * BLOCK_SIZE
    accumulator, row_max, row_sum = attend_tiles(
        query,
        rest,
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        row_max,
        row_sum,
        key_ptr + kv_head // PARTS * KEY_HEAD,
        value_ptr + kv_head // PARTS * VALUE_HEAD,
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
        NUM_KV_HEADS // PARTS,
        KEY_BLOCK,
        KEY_TOKEN,
        VALUE_BLOCK,
        VALUE_TOKEN,
        HEAD_DIM,
        VALUE_DIM,
        IS_LATENT,
        SLIDING_WINDOW,
        CHUNK,
        SOFT_CAP,
        PRECISION,
        BLOCK_N,
        BLOCK_D,
        BLOCK_V,
        BLOCK_R,
    )
    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if IS_SPLIT:
        ROWS: tl.constexpr = GROUP * MAX_QUERY_LEN
        partial_row = ((sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_splits + split) * ROWS + rows
        tl.store(partial_ptr + partial_row[:, None] * VALUE_DIM + value_dims[None, :], accumulator, mask=value_mask)
        tl.store(partial_lse_ptr + partial_row, log_sum(row_max, row_sum), mask=is_row)
    else:
        result_offsets = ((result_rows * NUM_KV_HEADS * GROUP + heads) * VALUE_DIM)[:, None] + value_dims[None, :]
        tl.store(result_ptr + result_offsets, accumulator.to(result_ptr.dtype.element_ty), mask=value_mask)


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
    VALUE_DIM: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Combine the splits of one query row, `grid: (NUM_KV_HEADS * GROUP * MAX_QUERY_LEN, num_seqs)`."""
    ROWS: tl.constexpr = GROUP * MAX_QUERY_LEN
    kv_head, row, sequence = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS, tl.program_id(1)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    if (query_len > MAX_QUERY_LEN) | (row // GROUP >= query_len):
        return
    first_tile, end_tile, tiles_per_split = split_tiles(
        context_len, query_len, num_splits, REACH, CHUNK, MIN_TILES, BLOCK_N
    )
    num_written = tl.maximum(tl.cdiv(end_tile - first_tile, tiles_per_split), 1)

    sequence_row = (sequence.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_splits * ROWS
    combined = combine_splits(
        partial_ptr, partial_lse_ptr, sequence_row + row, ROWS, num_written, VALUE_DIM, BLOCK_S, BLOCK_V
    )
    dims = tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + row % GROUP
    result_row = (first_row + row // GROUP).to(tl.int64) * NUM_KV_HEADS * GROUP + head
    combined = combined.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + result_row * VALUE_DIM + dims, combined, mask=dims < VALUE_DIM)
