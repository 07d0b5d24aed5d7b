"""Chooses for the experts of a layer what multiplies them fastest on their device."""

from __future__ import annotations

from kernels.activation.experts import ExpertActivation, GatedActivation
from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, has_float8, has_kernels
from kernels.linear import LinearFactory
from kernels.moe.cpu import CpuExperts, can_pack_experts, pack_experts
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.layers import ExpertLayers, Experts, LinearExperts
from kernels.moe.stacks import stack_experts


def make_experts(
    factory: LinearFactory,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: ExpertActivation,
    first_expert: int = 0,
) -> Experts:
    """Make the experts of a layer; the plain weights can be freed afterwards.

    Args:
        factory: Makes linear layers of experts that no kernel takes together.
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]`; the gates' features come before the up
            projection's, which are alone where the activation has no gate.
        down: `[num_experts, hidden_size, intermediate_size]`.
        activation: Of all experts.
        first_expert: The number of the first of these experts among those of all ranks, as routing counts them.
    """
    is_gated = isinstance(activation, GatedActivation)
    if can_pack_experts(gate_up) and can_pack_experts(down) and (library := cpu_library()) is not None:
        packed = (
            pack_experts(library, gate_up, is_gated=is_gated),
            pack_experts(library, down, is_gated=False),
        )
        return CpuExperts(library, *packed, activation, first_expert)
    if has_kernels(gate_up.device):
        from kernels.moe.gpu import GpuExperts

        stacks = stack_experts(gate_up, is_gated=is_gated), stack_experts(down, is_gated=False)
        gpu, multiplies_float8 = gpu_of(gate_up.device), has_float8(gate_up.device)
        return GpuExperts(*stacks, activation, first_expert, gpu, has_float8=multiplies_float8)
    layers = [
        ExpertLayers(
            factory.make(gate_up.forms[expert], gate_up.bias_of(expert)),
            factory.make(down.forms[expert], down.bias_of(expert)),
        )
        for expert in range(gate_up.num_experts)
    ]
    return LinearExperts(layers, activation, first_expert, gate_up.device)
