"""Mixtures of experts written down token by token in float64, as the papers have them: the oracle of the reference."""

from __future__ import annotations

import math

import torch


def route_token(logits: list[float], options: dict[str, object]) -> dict[int, float]:
    """Return the weight of each chosen expert of a token."""
    score, top_k = options["score"], options["top_k"]
    groups, top_groups = options.get("num_groups", 1), options.get("top_k_groups", 1)
    total = math.fsum(math.exp(value) for value in logits)
    scores = list(logits)
    if score == "softmax":
        scores = [math.exp(value) / total for value in logits]
    elif score == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    bias = options.get("bias")
    choice = [value + (0 if bias is None else float(bias[i])) for i, value in enumerate(scores)]
    size = len(logits) // groups

    def worth(group: int) -> float:
        best = sorted(choice[group * size : (group + 1) * size], reverse=True)
        return best[0] if options.get("group_score", "max") == "max" else best[0] + best[1]

    kept = sorted(range(groups), key=lambda group: (-worth(group), group))[:top_groups]
    candidates = [expert for expert in range(len(logits)) if expert // size in kept]
    chosen = sorted(candidates, key=lambda expert: (-choice[expert], expert))[:top_k]
    weights = [scores[expert] for expert in chosen]
    if score == "softmax_after_topk":
        weights = [math.exp(value) for value in weights]
        weights = [value / math.fsum(weights) for value in weights]
    if options.get("renormalize"):
        weights = [value / math.fsum(weights) for value in weights]
    return {expert: value * options.get("scale", 1.0) for expert, value in zip(chosen, weights, strict=True)}


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def gpt_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """With alpha 1.702 and a limit of 1.5, which random numbers reach."""
    gate = torch.where(gate > 1.5, 1.5, gate)
    up = torch.where(up > 1.5, 1.5, torch.where(up < -1.5, -1.5, up))
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def relu_squared(up: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
    assert not nothing.numel()
    return torch.where(up > 0, up * up, 0.0)
