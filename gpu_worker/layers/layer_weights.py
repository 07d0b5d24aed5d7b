"""The weights of one decoder layer, as a checkpoint gives them, before a device's form of them is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_traits import AttentionShape, GatedDeltaShape, LatentShape, Mamba2Shape
from kernels.activation import Activation, Xielu
from kernels.gated_delta import DeltaWeights
from kernels.linear.forms import WeightForm
from kernels.moe import ExpertActivation, ExpertWeights, RoutingRule
from kernels.rope_kv_write import HeadNormWeights
from kernels.ssd import SsdWeights


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix, `[out_features, in_features]`, in whatever form, and an optional bias, `[out_features]`."""

    weight: WeightForm
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A normalisation of vectors.

    Attributes:
        weight: `[size]`.
        eps: Added to the mean square, or to the variance.
        bias: `[size]`, added last.
        is_centered: The mean is subtracted first (LayerNorm).
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    is_centered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is RMS normalisation, which every kernel computes."""
        return self.bias is None and not self.is_centered


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The normalisations around a layer's two blocks; None where there is none.

    Attributes:
        before_mixer, before_feed_forward: Of what the blocks read of the residual stream.
        after_mixer, after_feed_forward: Of what they add to it.
    """

    before_mixer: NormWeights | None = None
    after_mixer: NormWeights | None = None
    before_feed_forward: NormWeights | None = None
    after_feed_forward: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Self-attention.

    Attributes:
        shape: Its sizes and options.
        qkv: Yields the query heads, then the key heads, then the value heads; only queries where the layer reads
            another's cache. The dimensions of query and key heads are in the order of `rotary_order.head_order`.
        output: From the heads back to the residual stream.
        head_norm: Of query and key heads: `[head_dim]` each, or `[num_heads * head_dim]` and
            `[num_kv_heads * head_dim]` (`WHOLE`, `APART`). Where there are no keys their weights mean nothing.
        sinks: `[num_heads]` float32, where the shape says so.
        query_factors: `[head_dim]`, what rotated queries are multiplied by: where heads are normalised after the
            rotation, the norm's weights of queries times those of keys. Keys are cached without their weights.
    """

    shape: AttentionShape
    qkv: Projection
    output: Projection
    head_norm: HeadNormWeights | None = None
    sinks: torch.Tensor | None = None
    query_factors: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Attention by latent vectors.

    Attributes:
        shape: Its sizes and options.
        query_down: To `query_rank` features, which `query_norm` normalises; None where there is one matrix.
        query_norm: `[query_rank]`.
        query: Yields the query heads.
        latent: Yields the latent vector, which `latent_norm` normalises, and the dimensions that turn.
        latent_norm: `[latent_dim]`.
        eps: Of both normalisations.
        key_up: `[num_heads, plain_dim, latent_dim]`, from a latent vector to the keys.
        value_up: `[num_heads, latent_dim, value_dim]`, to the values.
        output: From the heads back to the residual stream.
    """

    shape: LatentShape
    query_down: Projection | None
    query_norm: torch.Tensor | None
    query: Projection
    latent: Projection
    latent_norm: torch.Tensor
    eps: float
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Projection


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """A gated delta net.

    Attributes:
        shape: Its sizes.
        inputs: Yields queries, keys, values, then the gates of the output.
        gates: Yields the strengths of the value heads, then their steps.
        conv: `[conv_width, num_features]`, of queries, keys and values.
        delta: Of the decays.
        norm: `[value_dim]`, of what is read.
        eps: Of that normalisation.
        output: From the heads back to the residual stream.
    """

    shape: GatedDeltaShape
    inputs: Projection
    gates: Projection
    conv: torch.Tensor
    delta: DeltaWeights
    norm: torch.Tensor
    eps: float
    output: Projection


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """A Mamba-2 mixer.

    Attributes:
        shape: Its sizes.
        inputs: Yields the gates of the output, then values, input vectors and output vectors, then the steps.
        conv: `[conv_width, num_features]`, of values, input vectors and output vectors.
        conv_bias: `[num_features]`, if it has one.
        ssd: Of decays, and of what passes the state by.
        norm: `[inner_size]`, of what is read; None where it is not normalised.
        eps: Of that normalisation.
        output: From the heads back to the residual stream.
    """

    shape: Mamba2Shape
    inputs: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    ssd: SsdWeights
    norm: torch.Tensor | None
    eps: float
    output: Projection


@dataclass(frozen=True, slots=True)
class AttentionBesideMamba2Weights:
    """Both mixers of the same vectors."""

    attention: AttentionWeights
    mamba2: Mamba2Weights


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated feed-forward block; `gate_up` yields the gate's features, then the up projection's."""

    gate_up: Projection
    down: Projection
    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A feed-forward block without a gate."""

    up: Projection
    down: Projection
    activation: Activation | Xielu


@dataclass(frozen=True, slots=True)
class SharedExpertWeights:
    """The expert that all tokens get.

    Attributes:
        gate_up: Yields the gate's features, if it has a gate, then the up projection's.
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
        activation: Of all experts; without gates, the shared one has none either.
        weighs_inputs: A token's weight multiplies what its expert is given.
        scales: `[num_experts]` float32, what the weights of tokens are multiplied by, if anything.
        latent: To what experts are given, and back from what they give, where that is not the stream.
    """

    router: Projection
    rule: RoutingRule
    gate_up: ExpertWeights
    down: ExpertWeights
    activation: ExpertActivation
    shared: SharedExpertWeights | None = None
    weighs_inputs: bool = False
    scales: torch.Tensor | None = None
    latent: tuple[Projection, Projection] | None = None


@dataclass(frozen=True, slots=True)
class DenseAndMixtureWeights:
    """A gated block and a mixture, both of the stream as it is.

    Attributes:
        dense, mixture: The blocks.
        before_dense, before_mixture: Normalisations of what they read.
        after_dense, after_mixture: Normalisations of their results, whose sum is the layer's.
        before_router: Of what the mixture's router reads.
    """

    dense: GatedWeights
    mixture: MixtureWeights
    before_dense: NormWeights
    before_mixture: NormWeights
    after_dense: NormWeights
    after_mixture: NormWeights
    before_router: NormWeights


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """A gated short convolution.

    Attributes:
        inputs: Yields the gate of the input, that of the output, then the input.
        conv: `[conv_width, num_channels]`.
        bias: `[num_channels]`, if it has one.
        output: Back to the residual stream.
    """

    inputs: Projection
    conv: torch.Tensor
    bias: torch.Tensor | None
    output: Projection


Mixer = (
    AttentionWeights
    | LatentWeights
    | GatedDeltaWeights
    | ShortConvWeights
    | Mamba2Weights
    | AttentionBesideMamba2Weights
)
"""What a layer mixes tokens by."""

FeedForward = GatedWeights | PlainWeights | MixtureWeights | DenseAndMixtureWeights
"""What a layer does to each token alone."""


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """How a layer adds its input of each token to the stream.

    Attributes:
        gate: `[size, hidden_size]`, from the stream to what the input is multiplied by.
        projection: `[hidden_size, size]`, of the product.
        norm: Of what is added.
        activation: Of the gate.
    """

    gate: Projection
    projection: Projection
    norm: NormWeights
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything that distinguishes a layer.

    Attributes:
        mixer: None where the layer has none.
        feed_forward: None where the layer has none.
        norms: Around both.
        is_parallel: The feed-forward block reads what the mixer reads, rather than what the mixer has added to.
        residual_scale: What both blocks add is multiplied by this.
        stream_scale: The residual stream behind the layer is multiplied by this.
        layer_input: Of the layer's input of each token, in models that have such.
        is_post_norm: The normalisations behind both are of the stream with what they add.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: LayerNorms
    is_parallel: bool = False
    residual_scale: float = 1.0
    stream_scale: float = 1.0
    layer_input: LayerInputWeights | None = None
    is_post_norm: bool = False
