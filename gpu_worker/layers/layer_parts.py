"""From the weights of a layer's blocks to the blocks: one line a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.bidirectional_attention import BidirectionalAttention
from gpu_worker.layers.dense_and_mixture import DenseAndMixture
from gpu_worker.layers.gated_delta_net import GatedDeltaNet
from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.latent_attention import LatentAttention
from gpu_worker.layers.layer_inputs import LayerInputBlock
from gpu_worker.layers.layer_norm import make_norm
from gpu_worker.layers.layer_state import LayerState
from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.layers.layer_weights import (
    AttentionBesideMamba2Weights,
    AttentionWeights,
    DenseAndMixtureWeights,
    FeedForward,
    GatedDeltaWeights,
    GatedWeights,
    LatentWeights,
    LayerInputWeights,
    Mamba2Weights,
    Mixer,
    MixtureWeights,
    PlainWeights,
    Projection,
    ShortConvWeights,
)
from gpu_worker.layers.mamba2 import AttentionBesideMamba2, Mamba2
from gpu_worker.layers.mixture import Mixture, SharedExpert
from gpu_worker.layers.plain_mlp import PlainMLP
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.short_conv import ShortConv
from kernels.activation import Activation
from kernels.linear import Linear, LinearFactory
from kernels.moe import Experts, GatedActivation, make_experts
from kernels.state_rows import StateRows


class MixerBlock(Protocol):
    """What mixes the tokens of a sequence: attention, or a recurrence."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Read `x: [num_tokens, hidden_size]`, keep what later tokens need, and return what is to be added."""
        ...


@runtime_checkable
class RecurrentBlock(Protocol):
    """A mixer with a state that tokens change."""

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens whose `inputs`, `[num_tokens, num_inputs]`, were computed before."""
        ...


class FeedForwardBlock(Protocol):
    """What transforms each token by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What the blocks of a layer are made with.

    Attributes:
        linear: Makes the form of a matrix.
        experts: Makes those of a mixture.
        rotations: The model's rotary tables.
    """

    linear: Callable[[Projection], Linear]
    experts: Callable[[MixtureWeights], Experts]
    rotations: Rotations

    @classmethod
    def made_by(cls, linears: LinearFactory, rotations: Rotations) -> LayerParts:
        """Make the fastest forms of matrices and experts, by `linears`."""

        def linear(projection: Projection) -> Linear:
            return linears.make(projection.weight, projection.bias)

        def experts(weights: MixtureWeights) -> Experts:
            return make_experts(linears, weights.gate_up, weights.down, weights.activation)

        return cls(linear, experts, rotations)

    def mixer(self, index: int, weights: Mixer) -> MixerBlock:
        """Make a layer's mixer; `index` is the layer's number, by which it finds its cache."""
        block: MixerBlock = _MIXERS[type(weights)](self, index, weights)
        return block

    def feed_forward(self, weights: FeedForward) -> FeedForwardBlock:
        """Make a layer's feed-forward block."""
        block: FeedForwardBlock = _FEED_FORWARDS[type(weights)](self, weights)
        return block

    def layer_input(self, weights: LayerInputWeights) -> LayerInputBlock:
        """Make what adds a layer's input of each token."""
        gate, projection = self.linear(weights.gate), self.linear(weights.projection)
        return LayerInputBlock(gate, projection, make_norm(weights.norm), weights.activation)


def _attention(parts: LayerParts, index: int, weights: AttentionWeights) -> Attention:
    qkv, output = parts.linear(weights.qkv), parts.linear(weights.output)
    return Attention(index, weights, qkv, output, parts.rotations.of(weights.shape))


def _either_attention(parts: LayerParts, index: int, weights: AttentionWeights) -> Attention | BidirectionalAttention:
    if not weights.shape.sees_later:
        return _attention(parts, index, weights)
    qkv, output = parts.linear(weights.qkv), parts.linear(weights.output)
    return BidirectionalAttention(weights, qkv, output, parts.rotations.of(weights.shape))


def _latent(parts: LayerParts, index: int, weights: LatentWeights) -> LatentAttention:
    down = None if weights.query_down is None else parts.linear(weights.query_down)
    query, latent, output = map(parts.linear, (weights.query, weights.latent, weights.output))
    cos_sin = parts.rotations.of(AttentionShape(head_dim=weights.shape.rotary_dim))
    return LatentAttention(index, weights, down, query, latent, output, cos_sin)


def _short_conv(parts: LayerParts, index: int, weights: ShortConvWeights) -> ShortConv:
    return ShortConv(index, weights, parts.linear(weights.inputs), parts.linear(weights.output))


def _gated_delta(parts: LayerParts, index: int, weights: GatedDeltaWeights) -> GatedDeltaNet:
    return GatedDeltaNet(index, weights, *map(parts.linear, (weights.inputs, weights.gates, weights.output)))


def _mamba2(parts: LayerParts, index: int, weights: Mamba2Weights) -> Mamba2:
    return Mamba2(index, weights, parts.linear(weights.inputs), parts.linear(weights.output))


def _beside(parts: LayerParts, index: int, weights: AttentionBesideMamba2Weights) -> AttentionBesideMamba2:
    return AttentionBesideMamba2(_attention(parts, index, weights.attention), _mamba2(parts, index, weights.mamba2))


def _gated(parts: LayerParts, weights: GatedWeights) -> GatedMLP:
    return GatedMLP(parts.linear(weights.gate_up), parts.linear(weights.down), weights.activation)


def _plain(parts: LayerParts, weights: PlainWeights) -> PlainMLP:
    return PlainMLP(parts.linear(weights.up), parts.linear(weights.down), weights.activation)


def _mixture(parts: LayerParts, weights: MixtureWeights) -> Mixture:
    shared = None
    if weights.shared is not None:
        gate = None if weights.shared.gate is None else parts.linear(weights.shared.gate)
        first, down = parts.linear(weights.shared.gate_up), parts.linear(weights.shared.down)
        is_gated = isinstance(weights.activation, GatedActivation)
        block = GatedMLP(first, down) if is_gated else PlainMLP(first, down, Activation.RELU_SQUARED)
        shared = SharedExpert(block, gate)
    router = parts.linear(weights.router)
    latent = None if weights.latent is None else (parts.linear(weights.latent[0]), parts.linear(weights.latent[1]))
    return Mixture(
        router,
        weights.rule,
        parts.experts(weights),
        shared,
        weighs_inputs=weights.weighs_inputs,
        scales=weights.scales,
        latent=latent,
    )


def _dense_and_mixture(parts: LayerParts, weights: DenseAndMixtureWeights) -> DenseAndMixture:
    return DenseAndMixture(weights, _gated(parts, weights.dense), _mixture(parts, weights.mixture))


_MIXERS: dict[type, Callable[[LayerParts, int, Any], MixerBlock]] = {
    AttentionWeights: _either_attention,
    LatentWeights: _latent,
    GatedDeltaWeights: _gated_delta,
    ShortConvWeights: _short_conv,
    Mamba2Weights: _mamba2,
    AttentionBesideMamba2Weights: _beside,
}

_FEED_FORWARDS: dict[type, Callable[[LayerParts, Any], FeedForwardBlock]] = {
    GatedWeights: _gated,
    PlainWeights: _plain,
    MixtureWeights: _mixture,
    DenseAndMixtureWeights: _dense_and_mixture,
}
