# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Paged attention for many query tokens per sequence: chunks of prompts, causal, in tiles for the tensor cores.

The grid depends only on the sizes of the tensors: a program finds its sequence by a search of `query_starts`.
Source: Ringlein et al., arXiv 2511.11581, section 4 (packed query blocks, search on the device).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.triton_tiles import MASK_BITS, attend_tiles, finish_rows, load_hidden


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


@triton.jit(do_not_specialize=["num_seqs"])
def chunk_attention_kernel(
    result_ptr,
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
    num_seqs,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_QUERY_LEN: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from one block of packed query rows to all tokens that they see.

    Grid: `(num_kv_heads, num_tokens // (BLOCK_M // GROUP) + num_seqs)`. Sequences with fewer than MIN_QUERY_LEN query
    tokens are left alone.
    """
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # Late blocks see most tokens: they start first, so that the last to run are short.
    query_block = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = find_sequence(query_starts_ptr, query_block, num_seqs, BLOCK_TOKENS)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    context_len = tl.load(context_lens_ptr + sequence)
    first_token = (query_block - first_row // BLOCK_TOKENS - sequence) * BLOCK_TOKENS
    if (query_len < MIN_QUERY_LEN) | (first_token >= query_len):
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    is_row = (rows < BLOCK_TOKENS * GROUP) & (tokens < query_len)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    result_rows = (first_row + tokens).to(tl.int64)
    query_offsets = (result_rows * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    row_positions = tl.where(is_row, context_len - query_len + tokens, -1)
    hidden = load_hidden(tree_masks_ptr, result_rows, is_row)
    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    if scales_ptr is not None:
        scales_ptr += kv_head * BLOCK_SIZE
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # Tiles in three runs: those that the window cuts, those that every row sees in full, those on the diagonal and
    # those before it that masks speak of.
    first_position = context_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_TOKENS, context_len) - 1
    end_tile = last_position // BLOCK_N + 1
    full_tile = 0
    if SLIDING_WINDOW > 0:
        first_tile = tl.maximum(first_position - REACH + 1, 0) // BLOCK_N
        full_tile = tl.minimum(tl.cdiv(tl.maximum(last_position - SLIDING_WINDOW + 1, 0), BLOCK_N), end_tile)
        accumulator, row_max, row_sum = attend_tiles(
            query, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr, first_tile, full_tile,
            row_positions, hidden, context_len, score_scale, True, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM,
            SLIDING_WINDOW, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    first_hidden = first_position + 1
    if hidden is not None:
        first_hidden = tl.maximum(first_hidden - MASK_BITS, 0)
    diagonal_tile = tl.maximum(first_hidden // BLOCK_N, full_tile)
    accumulator, row_max, row_sum = attend_tiles(
        query, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr, full_tile, diagonal_tile,
        row_positions, hidden, context_len, score_scale, False, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM,
        SLIDING_WINDOW, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    accumulator, row_max, row_sum = attend_tiles(
        query, accumulator, row_max, row_sum, key_ptr, value_ptr, scales_ptr, table_ptr, diagonal_tile, end_tile,
        row_positions, hidden, context_len, score_scale, True, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM,
        SLIDING_WINDOW, SOFT_CAP, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    accumulator = finish_rows(accumulator, row_sum, scales_ptr)
    result_offsets = ((result_rows * NUM_KV_HEADS * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(result_ptr + result_offsets, accumulator.to(result_ptr.dtype.element_ty), mask=mask)
