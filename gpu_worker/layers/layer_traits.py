"""What a layer of a decoder consists of: its sizes and options, without its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gpu_worker.layers.mixture_shape import MixtureShape
from kernels.activation import Activation, Xielu
from kernels.gated_delta import DeltaSizes
from kernels.ssd import SsdSizes


class HeadNorm(Enum):
    """How queries and keys are normalised, before the rotation unless it is said otherwise."""

    NONE = "none"
    HEADS = "heads"
    """Each head by itself, all with the same weights."""
    UNWEIGHTED = "unweighted"
    """Each head by itself, without weights: the same before the rotation and after it."""
    ROTATED = "rotated"
    """Each head by itself, behind the rotation."""
    WHOLE = "whole"
    """All query heads as one vector, and all key heads as one."""
    APART = "apart"
    """Each head by itself, centred as by LayerNorm, with weights of its own."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position `p` are multiplied by `1 + factor * log(1 + (p + shift) // length)`."""

    factor: float
    length: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of an attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: Zero in the traits of a family, whose checkpoints have their own.
        sliding_window: Tokens that a query sees, itself included; None sees all.
        chunk_size: Tokens of the stretches, counted from a sequence's first token, within which tokens see one another.
        scale: What scores are multiplied by; None is `head_dim ** -0.5`.
        soft_cap: Scores are bent to stay between minus this and this, if given.
        rotary: Which of the model's rotations turns queries and keys; None turns none.
        rotary_dim: Dimensions of a head that turn, the first ones; None is all.
        interleaved: The checkpoint pairs a dimension with the next, not with the one half of `rotary_dim` further on.
        head_norm: How queries and keys are normalised.
        qkv_clip: Queries, keys and values, once normalised, are cut to stay between minus this and this, if given.
        qkv_bias: The query, key and value projections have a bias.
        output_bias: The output projection has one.
        output_scale: What the layer yields is multiplied by.
        has_sinks: Each query head has a learned score of seeing nothing.
        query_growth: By how much queries grow with their position, if they do.
        value_norm: Value heads are normalised, without weights.
        values_are_keys: The key projection yields the values too, which are its results before they are normalised.
        output_gate: The query projection yields, for each head, the query and behind it a gate, whose sigmoid the
            attended values are multiplied by.
        has_gate_matrix: The checkpoint has the gates in a matrix of their own, in the order of the heads.
        by_head: The checkpoint's one matrix yields for each head its query, key and value, not all queries first.
        reads_layer: The earlier layer whose keys and values this one attends to, having none of its own. That layer
            has the same heads, window and rotation.
        value_dim: Numbers of a value head; None is `head_dim`.
        sees_later: Tokens see later ones too, so that all tokens of a sequence have to be in one step. A window
            reaches as far to the other side, then.
    """

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    sliding_window: int | None = None
    chunk_size: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    rotary: int | None = 0
    rotary_dim: int | None = None
    interleaved: bool = False
    head_norm: HeadNorm = HeadNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    output_scale: float = 1.0
    has_sinks: bool = False
    query_growth: QueryGrowth | None = None
    value_norm: bool = False
    values_are_keys: bool = False
    output_gate: bool = False
    has_gate_matrix: bool = False
    by_head: bool = False
    reads_layer: int | None = None
    value_dim: int | None = None
    sees_later: bool = False
    qkv_clip: float | None = None

    @property
    def value_size(self) -> int:
        """Numbers of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Attention whose keys and values are made of one small vector a token, the latent one, which is all that is kept.

    Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Attributes:
        num_heads: Of queries, and of the keys and values that the latent vector stands for.
        query_rank: Features between the two matrices of the queries; None where one matrix makes them.
        latent_dim: Numbers of a latent vector.
        plain_dim: Dimensions of a key head that do not turn.
        rotary_dim: Dimensions that do, behind them; all heads have the same numbers there.
        value_dim: Of a value head.
        scale: What scores are multiplied by.
        interleaved: Dimensions are paired with the next, not with the one half of `rotary_dim` further on.
        has_bias: Projections from and to the stream have a bias, but for that of the queries where it is one matrix.
        query_growth: By how much queries grow with their position, if they do.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    has_bias: bool = False
    query_growth: QueryGrowth | None = None

    @property
    def key_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.latent_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class GatedShape:
    """A feed-forward block `down(activation(gate(x)) * up(x))`; with `has_bias`, all three matrices have one.

    What the gate's projection yields is multiplied by `gate_scale`, and what the block yields by `down_scale`.
    """

    inner_size: int
    activation: Activation = Activation.SILU
    has_bias: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A feed-forward block `down(activation(up(x)))`; with `has_bias`, both matrices have one.

    `Activation.XIELU` is a function whose numbers are tensors of the layer; where they are known already, it is the
    function itself.
    """

    inner_size: int
    activation: Activation | Xielu
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """A gated delta net.

    Attributes:
        sizes: Its heads.
        conv_width: Tokens that the convolution before it sees, each itself included.
        by_key_head: The checkpoint has the features of a key head beside those of its value heads, not all queries
            before all keys.
        gates_by_key_head: It has strengths and steps so, whether it has the other features so or not.
        values_by_turns: Its value heads stand by turns: the first of each key head, then the second of each.
    """

    sizes: DeltaSizes
    conv_width: int
    by_key_head: bool = False
    gates_by_key_head: bool = False
    values_by_turns: bool = False


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A gated short convolution of `num_channels`, over `conv_width` tokens, each itself included.

    With `has_bias`, the convolution and both projections have one.
    """

    num_channels: int
    conv_width: int
    has_bias: bool = False


class OutputNorm(Enum):
    """How what is read of a state is normalised, a group of heads at a time, before or after it meets its gate."""

    NONE = "none"
    BEFORE_GATE = "before"
    AFTER_GATE = "after"


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """A Mamba-2 mixer.

    Attributes:
        sizes: Its heads and groups.
        conv_width: Tokens that the convolution before it sees, each itself included.
        norm: How its results are normalised.
        step_limits: Bounds of steps.
        has_conv_bias: The convolution has a bias.
        has_input_bias, has_output_bias: The projections have.
        input_scales: What the input projection yields is multiplied by: gates, values, input vectors, output vectors,
            steps.
        output_scale: What the mixer yields is multiplied by.
    """

    sizes: SsdSizes
    conv_width: int
    norm: OutputNorm = OutputNorm.AFTER_GATE
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_conv_bias: bool = True
    has_input_bias: bool = False
    has_output_bias: bool = False
    input_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionBesideMamba2Shape:
    """Both mixers of the same vectors, whose results are added."""

    attention: AttentionShape
    mamba2: Mamba2Shape


RecurrentShape = GatedDeltaShape | ShortConvShape | Mamba2Shape
"""What keeps a state of fixed size instead of keys and values."""

MixerShape = AttentionShape | LatentShape | RecurrentShape | AttentionBesideMamba2Shape
"""What a layer mixes tokens by."""


@dataclass(frozen=True, slots=True)
class DenseAndMixtureShape:
    """A gated block and a mixture of experts side by side, with normalisations of their own, of the same stream."""

    dense: GatedShape
    mixture: MixtureShape


FeedForwardShape = GatedShape | PlainShape | MixtureShape | DenseAndMixtureShape
"""What a layer does to each token alone."""


@dataclass(frozen=True, slots=True)
class LayerInputShape:
    """A small vector of each token for each layer, which the layer adds to the stream behind its blocks.

    Attributes:
        size: Numbers of a vector.
        vocab_size: Rows of the table that has the vectors of all layers.
        activation: Of the gate that the stream yields.
    """

    size: int
    vocab_size: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """One layer. Either part may be absent, in models whose layers have one block each."""

    mixer: MixerShape | None
    feed_forward: FeedForwardShape | None

    @property
    def dense(self) -> GatedShape | PlainShape | None:
        """The block that all tokens get, also one beside experts."""
        block = self.feed_forward.dense if isinstance(self.feed_forward, DenseAndMixtureShape) else self.feed_forward
        return None if isinstance(block, MixtureShape) else block

    @property
    def mixture(self) -> MixtureShape | None:
        """The experts, also those beside a dense block."""
        block = self.feed_forward.mixture if isinstance(self.feed_forward, DenseAndMixtureShape) else self.feed_forward
        return block if isinstance(block, MixtureShape) else None
