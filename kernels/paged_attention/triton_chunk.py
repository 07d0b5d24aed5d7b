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
    MASK_BITS,
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
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the first tile that a block's rows see, the end of their tiles, and how many each split takes."""
    first_tile = first_visible(first_position, REACH, CHUNK) // BLOCK_N
    last_position = tl.minimum(first_position + BLOCK_TOKENS, context_len) - 1
    end_tile = last_position // BLOCK_N + 1
    tiles_per_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), MIN_TILES)
    return first_tile, end_tile, tiles_per_split


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def chunk_attention_kernel(
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
    num_seqs,
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
    MIN_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend from one block of packed query rows to one split of the tokens that they see.

    Grid: `(num_kv_heads, num_tokens // (BLOCK_M // GROUP) + num_seqs, num_splits)`. Sequences with fewer than
    MIN_QUERY_LEN query tokens are left alone. Where one split holds all tokens the result is written, else for each row
    a partial result and the log2 of its sum of exponentials: the same code serves any number of splits, so that a batch
    of another size compiles nothing.
    """
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head, split = tl.program_id(0), tl.program_id(2)
    # Late blocks see most tokens: they start first, so that the last to run are short.
    query_block = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first_row, query_len, context_len, first_token = find_block(
        query_starts_ptr, context_lens_ptr, query_block, num_seqs, BLOCK_TOKENS
    )
    if (query_len < MIN_QUERY_LEN) | (first_token >= query_len):
        return
    first_position = context_len - query_len + first_token
    first_tile, end_tile, tiles_per_split = block_tiles(
        first_position, context_len, num_splits, REACH, CHUNK, MIN_TILES, BLOCK_TOKENS, BLOCK_N
    )
    is_whole = end_tile - first_tile <= tiles_per_split
    first_tile += split * tiles_per_split
    # The first split always writes, so that an empty context yields zeros.
    if (split > 0) & (first_tile >= end_tile):
        return
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    is_row = (rows < BLOCK_TOKENS * GROUP) & (tokens < query_len)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    value_dims = tl.arange(0, BLOCK_V)
    value_mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    result_rows = (first_row + tokens).to(tl.int64)
    query_offsets = result_rows * query_stride + heads * HEAD_DIM
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    rest = load_rest(query_ptr, query_offsets, is_row, HEAD_DIM, BLOCK_D, BLOCK_R)
    row_positions = tl.where(is_row, context_len - query_len + tokens, -1)
    hidden = load_hidden(tree_masks_ptr, result_rows, is_row)
    key_ptr += kv_head // PARTS * KEY_HEAD
    value_ptr += kv_head // PARTS * VALUE_HEAD
    if scales_ptr is not None:
        scales_ptr += kv_head // PARTS * BLOCK_SIZE
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max, row_sum = begin_rows(sinks_ptr, heads, is_row, split)

    # Tiles in three runs: those that the window or the chunk cuts, those that every row sees in full, those on the
    # diagonal and those before it that masks speak of.
    full_tile = first_tile
    if SLIDING_WINDOW + CHUNK > 0:
        last_position = tl.minimum(first_position + BLOCK_TOKENS, context_len) - 1
        full_tile = tl.cdiv(first_visible(last_position, SLIDING_WINDOW, CHUNK), BLOCK_N)
        full_tile = tl.minimum(tl.maximum(full_tile, first_tile), end_tile)
        accumulator, row_max, row_sum = attend_tiles(
            query, rest, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr,
            first_tile, full_tile, row_positions, hidden, context_len, score_scale, True, BLOCK_SIZE,
            NUM_KV_HEADS // PARTS, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, HEAD_DIM, VALUE_DIM, IS_LATENT,
            SLIDING_WINDOW, CHUNK, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R,
        )  # fmt: skip
    first_hidden = first_position + 1
    if hidden is not None:
        first_hidden = tl.maximum(first_hidden - MASK_BITS, 0)
    diagonal_tile = tl.minimum(tl.maximum(first_hidden // BLOCK_N, full_tile), end_tile)
    accumulator, row_max, row_sum = attend_tiles(
        query, rest, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr,
        full_tile, diagonal_tile, row_positions, hidden, context_len, score_scale, False, BLOCK_SIZE,
        NUM_KV_HEADS // PARTS, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, HEAD_DIM, VALUE_DIM, IS_LATENT,
        SLIDING_WINDOW, CHUNK, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R,
    )  # fmt: skip
    accumulator, row_max, row_sum = attend_tiles(
        query, rest, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr,
        diagonal_tile, end_tile, row_positions, hidden, context_len, score_scale, True, BLOCK_SIZE,
        NUM_KV_HEADS // PARTS, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, HEAD_DIM, VALUE_DIM, IS_LATENT,
        SLIDING_WINDOW, CHUNK, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_R,
    )  # fmt: skip

    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    if is_whole:
        result_offsets = ((result_rows * NUM_KV_HEADS * GROUP + heads) * VALUE_DIM)[:, None] + value_dims[None, :]
        tl.store(result_ptr + result_offsets, accumulator.to(result_ptr.dtype.element_ty), mask=value_mask)
    else:
        block = query_block.to(tl.int64) * NUM_KV_HEADS + kv_head
        partial_row = (block * num_splits + split) * BLOCK_M + rows
        tl.store(partial_ptr + partial_row[:, None] * VALUE_DIM + value_dims[None, :], accumulator, mask=value_mask)
        tl.store(partial_lse_ptr + partial_row, log_sum(row_max, row_sum), mask=is_row)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def reduce_chunk_splits_kernel(
    result_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_seqs,
    num_splits,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MIN_QUERY_LEN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    REACH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Combine the splits of one packed query row, `grid: (NUM_KV_HEADS * BLOCK_M, query blocks)`."""
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head, row, query_block = tl.program_id(0) // BLOCK_M, tl.program_id(0) % BLOCK_M, tl.program_id(1)
    _, first_row, query_len, context_len, first_token = find_block(
        query_starts_ptr, context_lens_ptr, query_block, num_seqs, BLOCK_TOKENS
    )
    token = first_token + row // GROUP
    if (query_len < MIN_QUERY_LEN) | (token >= query_len) | (row >= BLOCK_TOKENS * GROUP):
        return
    first_tile, end_tile, tiles_per_split = block_tiles(
        context_len - query_len + first_token, context_len, num_splits, REACH, CHUNK, MIN_TILES, BLOCK_TOKENS, BLOCK_N
    )
    if end_tile - first_tile <= tiles_per_split:
        return
    block = query_block.to(tl.int64) * NUM_KV_HEADS + kv_head
    combined = combine_splits(
        partial_ptr,
        partial_lse_ptr,
        block * num_splits * BLOCK_M + row,
        BLOCK_M,
        tl.cdiv(end_tile - first_tile, tiles_per_split),
        VALUE_DIM,
        BLOCK_S,
        BLOCK_V,
    )
    head = kv_head * GROUP + row % GROUP
    result_row = (first_row + token).to(tl.int64) * NUM_KV_HEADS * GROUP + head
    dims = tl.arange(0, BLOCK_V)
    combined = combined.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + result_row * VALUE_DIM + dims, combined, mask=dims < VALUE_DIM)
