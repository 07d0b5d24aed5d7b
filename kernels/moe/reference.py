"""Routing and products with experts in plain torch: the oracle of the kernels."""

from __future__ import annotations

import torch

from kernels.activation.experts import ExpertActivation
from kernels.linear.reference import form_linear_reference
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.routing_rule import RoutingRule

# What DeepSeek-V3 adds to the sum that weights are divided by: scores of zero alone stay zero.
MIN_WEIGHT_SUM = 1e-20


def route_reference(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `kernels.moe.route` promises."""
    scores = logits.float()
    if rule.score == "softmax":
        scores = scores.softmax(dim=1)
    elif rule.score == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if rule.bias is None else scores + rule.bias
    if rule.top_k_groups < rule.num_groups:
        choice = _masked_by_group(choice, rule)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.score == "softmax_after_topk":
        weights = weights.softmax(dim=1)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + MIN_WEIGHT_SUM)
    return ids.int(), weights * rule.scale


def _masked_by_group(choice: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    groups = choice.view(len(choice), rule.num_groups, -1)
    best = groups.topk(1 if rule.group_score == "max" else 2, dim=2).values.sum(dim=2)
    chosen = best.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k_groups]
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return groups.masked_fill(~is_chosen[:, :, None], -torch.inf).flatten(1)


def experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: ExpertActivation,
    first_expert: int = 0,
) -> torch.Tensor:
    """Compute what `kernels.moe.Experts` promises: float32, rounded as the input of `down` and in the end."""
    result = torch.zeros(len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(gate_up.num_experts):
        tokens, places = torch.where(ids == first_expert + expert)
        if len(tokens) == 0:
            continue
        both = form_linear_reference(x[tokens], gate_up.forms[expert], gate_up.bias_of(expert), to_float32=True)
        hidden = activation(both).to(x.dtype)
        outputs = form_linear_reference(hidden, down.forms[expert], down.bias_of(expert), to_float32=True)
        result.index_add_(0, tokens, outputs * weights[tokens, places, None])
    return result.to(x.dtype)
