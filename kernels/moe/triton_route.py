# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Routing on a GPU: scores, the choice of groups and experts, and weights; and the sum of what the experts return."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.moe.reference import MIN_WEIGHT_SUM, RoutingRule

# Below all scores; those that are not to be chosen are minus infinity.
_LOWEST = tl.constexpr(-1.0e30)
_WARP_EXPERTS = 256


@triton.jit
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    num_groups,
    group_size,
    scale,
    logits_stride,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    NUM_BEST: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    MIN_SUM: tl.constexpr,
):
    """Program (token): a tile of groups and their experts; of equal scores the first is taken."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    group, inside = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    experts = group[:, None] * group_size + inside[None, :]
    is_expert = (group[:, None] < num_groups) & (inside[None, :] < group_size)
    scores = tl.load(logits + token * logits_stride + experts, mask=is_expert, other=-float("inf")).to(tl.float32)
    if SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    if SCORE == "sigmoid":
        decay = tl.exp(-tl.abs(scores))
        scores = tl.where(scores < 0, decay, 1.0) / (1.0 + decay)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)
    # A NaN compares as false with everything: no expert would have the best score.
    choice = tl.where(choice > _LOWEST, choice, _LOWEST)
    choice = tl.where(is_expert, choice, -float("inf"))
    if HAS_GROUPS:
        group_scores = tl.max(choice, axis=1)
        if NUM_BEST == 2:
            first = tl.min(tl.where(choice == group_scores[:, None], inside[None, :], SIZE), axis=1)
            second = tl.max(tl.where(inside[None, :] == first[:, None], -float("inf"), choice), axis=1)
            group_scores += second
        group_scores = tl.where(group < num_groups, group_scores, -float("inf"))
        is_chosen = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(is_chosen, -float("inf"), group_scores))
            number = tl.min(tl.where((group_scores == best) & (is_chosen == 0), group, GROUPS))
            is_chosen = is_chosen | (group == number)
        choice = tl.where(is_chosen[:, None], choice, -float("inf"))
    places = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], dtype=tl.int32)
    values = tl.full([PLACES], -float("inf"), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(choice)
        expert = tl.min(tl.where(choice == best, experts, 2147483647))
        is_best = experts == expert
        chosen = tl.where(places == place, expert, chosen)
        values = tl.where(places == place, tl.sum(tl.where(is_best & is_expert, scores, 0.0)), values)
        choice = tl.where(is_best, -float("inf"), choice)
    is_place = places < TOP_K
    if SCORE == "softmax_after_topk":
        values = tl.exp(values - tl.max(values))
        values = values / tl.sum(tl.where(is_place, values, 0.0))
    if RENORMALIZE:
        values = values / (tl.sum(tl.where(is_place, values, 0.0)) + MIN_SUM)
    tl.store(ids + token * TOP_K + places, chosen, mask=is_place)
    tl.store(weights + token * TOP_K + places, values * scale, mask=is_place)


def route_triton(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `kernels.moe.route` promises."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    group_size = num_experts // rule.num_groups
    groups, size = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(group_size)
    route_kernel[(num_tokens,)](
        logits,
        rule.bias,
        ids,
        weights,
        rule.num_groups,
        group_size,
        rule.scale,
        logits.stride(0),
        SCORE=rule.score,
        RENORMALIZE=rule.renormalize,
        TOP_K=rule.top_k,
        TOP_GROUPS=rule.top_k_groups,
        HAS_GROUPS=rule.top_k_groups < rule.num_groups,
        NUM_BEST=1 if rule.group_score == "max" else 2,
        PLACES=triton.next_power_of_2(rule.top_k),
        GROUPS=groups,
        SIZE=size,
        MIN_SUM=MIN_WEIGHT_SUM,
        num_warps=max(1, min(4, groups * size // _WARP_EXPERTS)),
        **dependent_launch(logits.device),
    )
    return ids, weights


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
