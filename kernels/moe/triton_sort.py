# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Sorts pairs of tokens and experts by expert on a GPU, in a grid that depends on shapes alone.

Each pair adds one to the count of its expert, and what the count was before is its rank among the expert's pairs. The
order in which pairs do so changes where their rows lie, and nothing else: a row's result depends on no other row. Few
pairs are sorted by one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs

_PAIRS_AT_ONCE = 1024
_NUM_WARPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """Rows of pairs whose expert is here, sorted by expert; a block of rows has one expert.

    Attributes:
        pairs: Of each row; `[num_pairs]` int32, of which those of experts elsewhere are missing.
        row_starts: First row of each expert, and the end; `[num_experts + 1]` int32.
        block_ends: The block behind the last of each expert; `[num_experts]` int32.
        block_m: Rows of a block.
        top_k: Pairs of a token.
    """

    pairs: torch.Tensor
    row_starts: torch.Tensor
    block_ends: torch.Tensor
    block_m: int
    top_k: int


@triton.jit
def _local(ids, pairs, num_pairs, first_expert, num_experts):
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) - first_expert
    return experts, (pairs < num_pairs) & (experts >= 0) & (experts < num_experts)


@triton.jit
def divide_kernel(
    counts, tokens_per_expert, row_starts, block_ends, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """One program for all experts: gives each its rows and blocks, by the counts of its pairs, which it clears."""
    experts = tl.arange(0, EXPERTS)
    mask = experts < num_experts
    count = tl.load(counts + experts, mask=mask, other=0, volatile=True)
    tl.store(row_starts + experts + 1, tl.cumsum(count, axis=0), mask=mask)
    tl.store(row_starts + experts, 0, mask=experts == 0)
    tl.store(block_ends + experts, tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, axis=0), mask=mask)
    total = tl.load(tokens_per_expert + experts, mask=mask, other=0)
    tl.store(tokens_per_expert + experts, total + count, mask=mask)
    tl.store(counts + experts, 0, mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    ids,
    counts,
    tokens_per_expert,
    row_starts,
    block_ends,
    sorted_pairs,
    num_pairs,
    first_expert,
    num_experts,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program for all pairs."""
    wait_for_inputs()
    pairs = tl.arange(0, PAIRS)
    experts, is_here = _local(ids, pairs, num_pairs, first_expert, num_experts)
    ranks = tl.atomic_add(counts + experts, 1, mask=is_here)
    tl.debug_barrier()
    divide_kernel(counts, tokens_per_expert, row_starts, block_ends, num_experts, EXPERTS, BLOCK_M)
    tl.debug_barrier()
    starts = tl.load(row_starts + experts, mask=is_here, other=0, volatile=True)
    tl.store(sorted_pairs + starts + ranks, pairs, mask=is_here)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, ranks, num_pairs, first_expert, num_experts, PAIRS: tl.constexpr):
    """Program (pairs): gives each pair a rank among those of its expert."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    experts, is_here = _local(ids, pairs, num_pairs, first_expert, num_experts)
    tl.store(ranks + pairs, tl.atomic_add(counts + experts, 1, mask=is_here), mask=is_here)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(ids, ranks, row_starts, sorted_pairs, num_pairs, first_expert, num_experts, PAIRS: tl.constexpr):
    """Program (pairs): puts each pair where its expert's rows start, behind those that came before."""
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    experts, is_here = _local(ids, pairs, num_pairs, first_expert, num_experts)
    starts = tl.load(row_starts + experts, mask=is_here, other=0)
    tl.store(sorted_pairs + starts + tl.load(ranks + pairs, mask=is_here, other=0), pairs, mask=is_here)


def sort_pairs(
    ids: torch.Tensor, counts: torch.Tensor, tokens_per_expert: torch.Tensor, first_expert: int, block_m: int
) -> SortedPairs:
    """Sort pairs by expert, and add each expert's to its tokens.

    Shapes:
        ids: `[num_tokens, top_k]` int32, contiguous
        counts: `[num_experts]` int32, zero whenever no sort is running
        tokens_per_expert: `[num_experts]` int64
    """
    num_pairs, num_experts = ids.numel(), len(counts)

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids.device)

    pairs, row_starts, block_ends = empty(num_pairs), empty(num_experts + 1), empty(num_experts)
    experts = triton.next_power_of_2(num_experts)
    if num_pairs <= _PAIRS_AT_ONCE:
        sort_kernel[(1,)](
            ids,
            counts,
            tokens_per_expert,
            row_starts,
            block_ends,
            pairs,
            num_pairs,
            first_expert,
            num_experts,
            PAIRS=max(16, triton.next_power_of_2(num_pairs)),
            EXPERTS=experts,
            BLOCK_M=block_m,
            num_warps=_NUM_WARPS,
            **dependent_launch(ids.device),
        )
        return SortedPairs(pairs, row_starts, block_ends, block_m, ids.shape[1])
    ranks, grid = empty(num_pairs), (triton.cdiv(num_pairs, _PAIRS_AT_ONCE),)
    count_kernel[grid](ids, counts, ranks, num_pairs, first_expert, num_experts, PAIRS=_PAIRS_AT_ONCE)
    divide_kernel[(1,)](
        counts, tokens_per_expert, row_starts, block_ends, num_experts, EXPERTS=experts, BLOCK_M=block_m
    )
    place_kernel[grid](ids, ranks, row_starts, pairs, num_pairs, first_expert, num_experts, PAIRS=_PAIRS_AT_ONCE)
    return SortedPairs(pairs, row_starts, block_ends, block_m, ids.shape[1])
