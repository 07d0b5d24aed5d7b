"""How the blocks of a family's layers are put together, and what its checkpoints call their tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kernels.activation import Activation


@dataclass(frozen=True, slots=True)
class NormKind:
    """How vectors are normalised.

    Attributes:
        is_centered: The mean is subtracted (LayerNorm).
        is_offset: The checkpoint stores weights less one.
    """

    is_centered: bool = False
    has_bias: bool = False
    is_offset: bool = False


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned vectors of positions, which are added to the tokens' embeddings.

    Attributes:
        first_row: Of the table, that of a sequence's first token.
    """

    num_positions: int
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingTraits:
    """Traits of the tokens' embeddings, which are normalised before the first layer.

    Attributes:
        num_segments: Rows of a table whose first one is added before; 0 where there is none.
    """

    num_segments: int = 0


@dataclass(frozen=True, slots=True)
class LayerInputShape:
    """A small vector of each token for each layer, which the layer adds to the stream behind its blocks.

    Attributes:
        vocab_size: Rows of the table that has the vectors of all layers.
        activation: Of the gate that the stream yields.
        image_token: Stands for the tokens of images.
    """

    size: int
    vocab_size: int
    activation: Activation
    image_token: int = 0


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names within a layer. A normalisation without a name does not exist; several names are matrices as one.

    Attributes:
        before_mixer, before_feed_forward: Normalisations of what the blocks read.
        after_mixer, after_feed_forward: Normalisations of what they add to the stream, or of the stream behind them.
        qkv: Three, or one where the checkpoint has one matrix; four where gates of the output have one of their own,
            behind that of the queries.
        gate_up: Two, or one.
        up, down: Of the feed-forward block; `up` where it has no gate.
        is_transposed: Matrices of attention, and of a block without a gate, are stored `[in_features, out_features]`.
        stream_scale: The number, `[1]`, that the stream behind the layer is multiplied by; None where there is none.
        renamed: Patterns of whole names, and what they are replaced by, where the checkpoint differs otherwise.
        unused: Patterns of tensors, after renaming, that a decoder of text has no use for, such as a vision tower's.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up: str = "up_proj"
    down: str = "down_proj"
    is_transposed: bool = False
    stream_scale: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()

    def own_name(self, stored: str) -> str:
        """Return the name that a tensor has here, by that which the checkpoint has for it."""
        for pattern, replacement in self.renamed:
            stored = re.sub(pattern, replacement, stored)
        return stored

    def is_unused(self, name: str) -> bool:
        """Whether the decoder has no use for the tensor of a name, after renaming."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


@dataclass(frozen=True, slots=True)
class BlockTraits:
    """What all layers of a model have in common, apart from sizes.

    Attributes:
        norm: Kind of all normalisations but those of heads without weights.
        is_post_norm: The normalisations behind blocks are of the stream, with what the blocks add to it.
        first_is_bare: The first layer has no normalisation of what its mixer reads.
        has_final_norm: The stream is normalised behind the last layer.
        embeddings: Traits of the tokens' embeddings; None leaves them as they are.
        is_parallel: Both blocks of a layer read the stream before it, by one normalisation or by one each.
        residual_scale: What blocks add to the stream is multiplied by this.
        embedding_scale: What the tokens' embeddings are multiplied by.
        positions: The vectors added to them, in models whose positions are learned.
        logit_scale: What the scores of the vocabulary are multiplied by.
        logit_soft_cap: What then bounds them, smoothly.
        layer_inputs: The vectors that layers are given of each token, in models that have such.
    """

    norm: NormKind = field(default_factory=NormKind)
    names: TensorNames = field(default_factory=TensorNames)
    is_post_norm: bool = False
    first_is_bare: bool = False
    has_final_norm: bool = True
    embeddings: EmbeddingTraits | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    positions: PositionTable | None = None
    has_head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_inputs: LayerInputShape | None = None

    @property
    def is_fusable(self) -> bool:
        """Whether the fused kernels of a CPU arrange layers this way; parts outside of layers do not count."""
        names = self.names
        return (
            not (self.norm.is_centered or self.norm.has_bias or self.is_parallel)
            and (names.after_mixer, names.after_feed_forward) == (None, None)
            and None not in (names.before_mixer, names.before_feed_forward)
            and self.residual_scale == self.embedding_scale == 1
            and self.layer_inputs is None
            and self.positions is None
            and self.embeddings is None
        )
