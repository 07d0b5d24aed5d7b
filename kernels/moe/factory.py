"""Chooses for the experts of a layer what multiplies them fastest on their device."""

from __future__ import annotations

from kernels.linear import LinearFactory
from kernels.moe.activation import GatedActivation
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.layers import ExpertLayers, Experts, LinearExperts


def make_experts(
    factory: LinearFactory,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: GatedActivation,
    first_expert: int = 0,
) -> Experts:
    """Make the experts of a layer; the plain weights can be freed afterwards.

    Args:
        factory: Makes linear layers of experts that no kernel takes together.
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]`; the gates' features come before the up
            projection's.
        down: `[num_experts, hidden_size, intermediate_size]`.
        activation: Of all experts.
        first_expert: The number that routing knows the first of these experts by; others are on other ranks.
    """
    layers = [
        ExpertLayers(
            factory.make(gate_up.forms[expert], gate_up.bias_of(expert)),
            factory.make(down.forms[expert], down.bias_of(expert)),
        )
        for expert in range(gate_up.num_experts)
    ]
    return LinearExperts(layers, activation, first_expert, gate_up.device)
