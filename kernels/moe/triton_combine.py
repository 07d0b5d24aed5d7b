# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Adds up the weighted results of each token's experts on a GPU, in the order in which the token has them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs

_BLOCK = 512
_NUM_WARPS = 4


@triton.jit
def combine_kernel(
    outputs, ids, weights, results, size, first_expert, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of features)."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids + pair) - first_expert
        is_here = (expert >= 0) & (expert < num_experts)
        # Rows of experts that are elsewhere were not written.
        output = tl.load(outputs + pair * size + columns, mask=mask & is_here, other=0.0)
        sums += tl.where(is_here, tl.load(weights + pair), 0.0) * output.to(tl.float32)
    tl.store(results + token * size + columns, sums.to(results.dtype.element_ty), mask=mask)


def combine(
    outputs: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int,
    num_experts: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weighted sum of each token's outputs.

    Shapes:
        outputs: `[num_tokens * top_k, size]`
        ids, weights: `[num_tokens, top_k]`, contiguous
        result: `[num_tokens, size]`
    """
    (num_tokens, top_k), size = ids.shape, outputs.shape[1]
    results = torch.empty((num_tokens, size), dtype=dtype, device=outputs.device)
    combine_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        *(outputs, ids, weights, results, size, first_expert, num_experts),
        TOP_K=top_k,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **dependent_launch(ids.device),
    )
    return results
