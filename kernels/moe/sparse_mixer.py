"""The routing of Phi-3.5-MoE, in plain torch on every device: it is a few operations over few numbers."""

from __future__ import annotations

import torch


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
