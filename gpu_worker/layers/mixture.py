"""A feed-forward block of experts: a router chooses some for each token, and all tokens may get one more."""

from __future__ import annotations

import torch

from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.plain_mlp import PlainMLP
from kernels.activation import times_sigmoid
from kernels.linear import Linear
from kernels.moe import Experts, RoutingRule, route


class SharedExpert:
    """The expert of all tokens, whose result may be weighed by a score of the token's own.

    Source: Dai et al., DeepSeekMoE, arXiv 2401.06066, section 3.2; the gate is Qwen2-MoE's.
    """

    __slots__ = ("_block", "_gate")

    def __init__(self, block: GatedMLP | PlainMLP, gate: Linear | None) -> None:
        """Hold the block; `gate` scores a token: `[1, hidden_size]`."""
        self._block = block
        self._gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        result = self._block(x)
        return result if self._gate is None else times_sigmoid(result, self._gate.to_float32(x))


class Mixture:
    """A mixture of experts.

    Source: Shazeer et al., arXiv 1701.06538; the rules of routing are those of `kernels.moe`.
    """

    __slots__ = ("_experts", "_latent", "_router", "_rule", "_scales", "_shared", "_weighs_inputs")

    def __init__(
        self,
        router: Linear,
        rule: RoutingRule,
        experts: Experts,
        shared: SharedExpert | None = None,
        *,
        weighs_inputs: bool = False,
        scales: torch.Tensor | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        """Hold the parts.

        Args:
            router: Scores the experts: `[num_experts, hidden_size]`.
            rule: From scores to experts and their weights.
            experts: All of them.
            shared: What every token gets besides.
            weighs_inputs: The weight multiplies what an expert is given; a token has one expert then.
            scales: `[num_experts]` float32, what weights are multiplied by.
            latent: To what experts are given, and back from what they give.
        """
        self._router = router
        self._rule = rule
        self._experts = experts
        self._shared = shared
        self._weighs_inputs = weighs_inputs
        self._scales = scales
        self._latent = latent

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens each expert got since the block was made: `[num_experts]` int64, on the device."""
        return self._experts.tokens_per_expert

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        return self.transform(x, x)

    def transform(self, x: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """Transform `x` by the experts that the router chooses by `scored`; both are `[num_tokens, hidden_size]`."""
        ids, weights = route(self._router.to_float32(scored), self._rule)
        if self._scales is not None:
            weights = weights * self._scales[ids]
        given = x if self._latent is None else self._latent[0](x)
        if self._weighs_inputs:
            result = self._experts(given * weights.to(x.dtype), ids, torch.ones_like(weights))
        else:
            result = self._experts(given, ids, weights)
        if self._latent is not None:
            result = self._latent[1](result)
        return result if self._shared is None else result + self._shared(x)
