"""Routing and products with experts in plain torch: the oracle of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.activation.experts import ExpertActivation
from kernels.linear.reference import form_linear_reference
from kernels.moe.expert_weights import ExpertWeights

Score = Literal["softmax", "sigmoid", "softmax_after_topk", "sparse_mixer"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRule:
    """A routing rule; of equal scores the expert or group with the lower number is chosen.

    Attributes:
        top_k: Experts of a token.
        score: What logits become: "softmax" and "sigmoid" over all experts, before the choice; "softmax_after_topk"
            chooses by the logits, and takes the softmax of the chosen ones; `sparse_mixer` describes "sparse_mixer".
        renormalize: Divide the weights of a token by their sum.
        bias: `[num_experts]` float32, added to the scores for the choice, not to the weights; None adds nothing.
        num_groups: Groups of neighbouring experts, of equal size.
        top_k_groups: Groups that a token chooses its experts from.
        group_score: What groups are chosen by: the highest score in them, or the sum of their two highest.
        scale: What weights are multiplied by in the end.
        jitter: Of the sparse mixer.
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    bias: torch.Tensor | None = None
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "max"
    scale: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        assert self.top_k > 0
        assert 0 < self.top_k_groups <= self.num_groups
        assert self.bias is None or self.bias.dtype is torch.float32


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
