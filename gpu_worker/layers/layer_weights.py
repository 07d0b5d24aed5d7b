"""The weights of one decoder layer, as a checkpoint gives them, before a device's form of them is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention import AttentionShape
from kernels.linear.forms import WeightForm
from kernels.moe import ExpertWeights, GatedActivation, RoutingRule
from kernels.rope_kv_write import HeadNormWeights


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix, `[out_features, in_features]`, in whatever form, and an optional bias, `[out_features]`."""

    weight: WeightForm
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything that distinguishes a layer.

    Attributes:
        shape: The sizes of its attention.
        attention_norm: `[hidden_size]`, or None where attention takes the stream as it is.
        qkv: Yields the query heads, then the key heads, then the value heads.
        head_norm: Of query and key heads, in families that have it.
        output: From the heads back to the residual stream.
        mlp_norm: `[hidden_size]`.
        gate_up: Yields the gate's features, then the up projection's.
        down: From those back to the residual stream.
    """

    shape: AttentionShape
    attention_norm: torch.Tensor | None
    qkv: Projection
    head_norm: HeadNormWeights | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class SharedExpertWeights:
    """The expert that all tokens get.

    Attributes:
        gate_up: Yields the gate's features, then the up projection's.
        gate: `[1, hidden_size]`, the score of a token whose sigmoid the result is multiplied by.
    """

    gate_up: Projection
    down: Projection
    gate: Projection | None = None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts.

    Attributes:
        router: `[num_experts, hidden_size]`.
        rule: From the router's logits to experts and their weights.
        gate_up, down: Of all experts.
        activation: Of all experts.
        weighs_inputs: A token's weight multiplies what its expert is given.
    """

    router: Projection
    rule: RoutingRule
    gate_up: ExpertWeights
    down: ExpertWeights
    activation: GatedActivation
    shared: SharedExpertWeights | None = None
    weighs_inputs: bool = False
