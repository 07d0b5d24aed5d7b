"""How a router's logits become the experts of a token and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

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
