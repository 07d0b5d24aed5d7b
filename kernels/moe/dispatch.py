"""Chooses the implementation of routing for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.gpu_config import has_kernels
from kernels.moe.cpu import can_route, route_cpu
from kernels.moe.reference import RoutingRule, route_reference


def route(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, and their weights.

    Logits that are not numbers give ids of experts that there are, and weights that are not numbers.

    Args:
        logits: Of the router.
        rule: With at most as many experts a token as the groups that it chooses have.

    Shapes:
        logits: `[num_tokens, num_experts]` float32
        ids: `[num_tokens, top_k]` int32, by falling score
        weights: `[num_tokens, top_k]` float32
    """
    assert rule.top_k <= logits.shape[1] // rule.num_groups * rule.top_k_groups
    if rule.score == "sparse_mixer":
        ids, weights = route_sparse_mixer(logits, rule.jitter)
        return ids, weights * rule.scale
    if has_kernels(logits.device):
        from kernels.moe.triton_route import route_triton

        return route_triton(logits, rule)
    if can_route(logits) and (library := cpu_library()) is not None:
        return route_cpu(library, logits, rule)
    return route_reference(logits, rule)


def route_sparse_mixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose two experts a token, one after the other, each weighed against those that come close to it.

    An expert's weight is its softmax among the experts whose logits are below its own by at most `2 * jitter` times
    their own size, or its logit where that is larger. The second one is chosen as if the first were not there.
    Source: Liu et al., GRIN, arXiv 2409.12136, as the model was trained; without its noise, which is for training.

    Shapes:
        logits: `[num_tokens, num_experts]` float32
        ids: `[num_tokens, 2]` int32
        weights: `[num_tokens, 2]` float32
    """
    left, chosen, weights = logits, [], []
    for _ in range(2):
        best, expert = left.max(dim=1, keepdim=True)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        close = left.masked_fill(is_far, -torch.inf)
        chosen.append(expert)
        weights.append(close.softmax(dim=1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(chosen, dim=1).int(), torch.cat(weights, dim=1)
