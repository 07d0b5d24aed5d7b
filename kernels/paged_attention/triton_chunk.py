# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for many query tokens per sequence: chunks of prompts, causal, in tiles for the tensor cores.

The grid depends only on the sizes of the tensors: a program finds its sequence by a search of `query_starts`. Where
blocks of queries are too few to fill the GPU, several programs share the cached tokens of a block (split-KV), and a
second kernel combines what they wrote.
Source: Ringlein et al., arXiv 2511.11581, section 4 (packed query blocks, search on the device).
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
    load_query,
    log_sum,
    num_cached,
    store_lse,
    store_rows,
)


@triton.jit
def find_sequence(query_starts_ptr, query_block, num_seqs, BLOCK_TOKENS: tl.constexpr):
    """Return the last sequence whose first query block is at most `query_block`.

    Sequence `s` starts at query block `query_starts[s] // BLOCK_TOKENS + s`: that leaves each sequence as many blocks
    as it needs, some one more, without a table.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_TOKENS + middle <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_block(query_starts_ptr, context_lens_ptr, query_block, num_seqs, BLOCK_TOKENS: tl.constexpr):
    """Return a query block's sequence, that sequence's first row, query length and context, and the block's offset."""
    sequence = find_sequence(query_starts_ptr, query_block, num_seqs, BLOCK_TOKENS)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    first_token = (query_block - first_row // BLOCK_TOKENS - sequence) * BLOCK_TOKENS
    return sequence, first_row, query_len, context_len, first_token


@triton.jit
def block_tiles(
    first_position,
    context_len,
    num_splits,
    MIN_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Return the first tile that a block's rows see, the end of their tiles, and how many each split takes."""
    first_tile = num_cached(first_visible(first_position, SHAPE.sliding_window, SHAPE.chunk), SHAPE) // BLOCK_N
    end_position = tl.minimum(first_position + BLOCK_TOKENS, context_len)
    end_tile = tl.cdiv(num_cached(end_position, SHAPE), BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), MIN_TILES)
    return first_tile, end_tile, tiles_per_split


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def chunk_attention_kernel(
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
    num_splits,
    MIN_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Attend from one block of packed query rows to one split of the tokens that they see.

    Grid: `(num_tokens // (BLOCK_M // group) + num_seqs, num_kv_heads, num_splits)`. Sequences with fewer than
    MIN_QUERY_LEN query tokens are left alone. Where one split holds all tokens the result is written, else for each row
    a partial result and the log2 of its sum of exponentials: the same code serves any number of splits, so that a batch
    of another size compiles nothing.
    """
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // SHAPE.group
    kv_head, split = tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    # Late blocks see most tokens: they start first, so that the last to run are short.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first_row, query_len, context_len, first_token = find_block(
        query_starts_ptr, context_lens_ptr, query_block, num_seqs, BLOCK_TOKENS
    )
    if (query_len < MIN_QUERY_LEN) | (first_token >= query_len):
        return
    first_position = context_len - query_len + first_token
    first_tile, end_tile, tiles_per_split = block_tiles(
        first_position, context_len, num_splits, MIN_TILES, BLOCK_TOKENS, BLOCK_N, SHAPE
    )
    is_whole = end_tile - first_tile <= tiles_per_split
    first_tile += split * tiles_per_split
    # The first split always writes, so that an empty context yields zeros.
    if (split > 0) & (first_tile >= end_tile):
        return
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    local_rows = tl.arange(0, BLOCK_M)
    tokens = first_token + local_rows // SHAPE.group
    is_row = (local_rows < BLOCK_TOKENS * SHAPE.group) & (tokens < query_len)
    heads = kv_head * SHAPE.group + local_rows % SHAPE.group
    token_rows = (first_row + tokens).to(tl.int64)
    query_offsets = token_rows * query_stride + heads * SHAPE.key_dim
    rows = QueryRows(
        load_query(query_ptr, query_offsets, is_row, SHAPE.key_dim, 0, SHAPE.block_d),
        load_query(query_ptr, query_offsets, is_row, SHAPE.key_dim, SHAPE.block_d, SHAPE.block_r),
        tl.where(is_row, context_len - query_len + tokens, -1),
    )
    cached_head = (kv_head // SHAPE.num_parts).to(tl.int64)
    key_ptr += cached_head * key_head_stride
    value_ptr += cached_head * value_head_stride
    if scales_ptr is not None:
        scales_ptr += cached_head * SHAPE.block_size
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    head = CachedHead(key_ptr, value_ptr, scales_ptr, table_ptr, num_cached(context_len, SHAPE))
    BLOCK_V: tl.constexpr = SHAPE.block_v
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max, row_sum = begin_rows(sinks_ptr, heads, is_row, split)

    # Tiles in three runs: those that the window or the chunk cuts, those that every row sees in full, those on the
    # diagonal.
    full_tile = first_tile
    if SHAPE.sliding_window + SHAPE.chunk > 0:
        last_position = tl.minimum(first_position + BLOCK_TOKENS, context_len) - 1
        last_seen = first_visible(last_position, SHAPE.sliding_window, SHAPE.chunk)
        full_tile = tl.cdiv(num_cached(last_seen, SHAPE), BLOCK_N)
        full_tile = tl.minimum(tl.maximum(full_tile, first_tile), end_tile)
        accumulator, row_max, row_sum = attend_tiles(
            rows, accumulator, row_max, row_sum, head, first_tile, full_tile, score_scale, True, BLOCK_N, SHAPE
        )
    diagonal_tile = num_cached(first_position + 1, SHAPE) // BLOCK_N
    diagonal_tile = tl.minimum(tl.maximum(diagonal_tile, full_tile), end_tile)
    accumulator, row_max, row_sum = attend_tiles(
        rows, accumulator, row_max, row_sum, head, full_tile, diagonal_tile, score_scale, False, BLOCK_N, SHAPE
    )
    accumulator, row_max, row_sum = attend_tiles(
        rows, accumulator, row_max, row_sum, head, diagonal_tile, end_tile, score_scale, True, BLOCK_N, SHAPE
    )

    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if is_whole:
        result_rows = token_rows * num_kv_heads * SHAPE.group + heads
        store_rows(result_ptr, result_rows, is_row, accumulator, SHAPE.value_dim)
        store_lse(lse_ptr, result_rows, is_row, log_sum(row_max, row_sum))
    else:
        block = query_block.to(tl.int64) * num_kv_heads + kv_head
        partial_rows = (block * num_splits + split) * BLOCK_M + local_rows
        store_rows(partial_ptr, partial_rows, is_row, accumulator, SHAPE.value_dim)
        tl.store(partial_lse_ptr + partial_rows, log_sum(row_max, row_sum), mask=is_row)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def reduce_chunk_splits_kernel(
    result_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_seqs,
    num_splits,
    MIN_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Combine the splits of one packed query row, `grid: (query blocks, num_kv_heads * BLOCK_M)`."""
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // SHAPE.group
    kv_head, row, query_block = tl.program_id(1) // BLOCK_M, tl.program_id(1) % BLOCK_M, tl.program_id(0)
    num_kv_heads = tl.num_programs(1) // BLOCK_M
    _, first_row, query_len, context_len, first_token = find_block(
        query_starts_ptr, context_lens_ptr, query_block, num_seqs, BLOCK_TOKENS
    )
    token = first_token + row // SHAPE.group
    if (query_len < MIN_QUERY_LEN) | (token >= query_len) | (row >= BLOCK_TOKENS * SHAPE.group):
        return
    first_tile, end_tile, tiles_per_split = block_tiles(
        context_len - query_len + first_token, context_len, num_splits, MIN_TILES, BLOCK_TOKENS, BLOCK_N, SHAPE
    )
    if end_tile - first_tile <= tiles_per_split:
        return
    first_split = (query_block.to(tl.int64) * num_kv_heads + kv_head) * num_splits * BLOCK_M + row
    num_written = tl.cdiv(end_tile - first_tile, tiles_per_split)
    combined, lse = combine_splits(partial_ptr, partial_lse_ptr, first_split, BLOCK_M, num_written, BLOCK_S, SHAPE)
    head = kv_head * SHAPE.group + row % SHAPE.group
    result_row = (first_row + token).to(tl.int64) * num_kv_heads * SHAPE.group + head
    dims = tl.arange(0, SHAPE.block_v)
    combined = combined.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + result_row * SHAPE.value_dim + dims, combined, mask=dims < SHAPE.value_dim)
    store_lse(lse_ptr, result_row, row < BLOCK_M, lse)
