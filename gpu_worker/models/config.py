"""What a checkpoint's `config.json` says about its model, in one form for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.cache_layout import CacheLayout, KeepsBoth, KeepsState
from gpu_worker.layers.layer import FeedForwardShape, LayerTraits, LayerWeights
from gpu_worker.layers.layer_source import LayerSource, Projections, QuantizedLayers, WeightSource
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.draft_head import DraftHead
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import check_rope, max_model_len, read_rope, read_rotary_dim
from gpu_worker.models.tensor_file import stored_dtype
from gpu_worker.quantization import fp8
from gpu_worker.quantization.config_fields import QuantizationError
from gpu_worker.quantization.method_reader import read_method
from gpu_worker.quantization.quantization_method import QuantizationMethod
from kernels.activation import Activation

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ACTIVATIONS = {
    "silu": Activation.SILU, "swish": Activation.SILU, "gelu": Activation.GELU, "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH, "relu": Activation.RELU, "relu2": Activation.RELU_SQUARED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """What BERT and its descendants have, and no other model.

    Attributes:
        num_positions, num_segments: Rows of the learned tables.
        first_position: The row of a sequence's first token.
        separator: Token behind which the second segment begins; None where there is one segment.
    """

    activation: Activation
    num_positions: int
    first_position: int
    num_segments: int
    separator: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of one model.

    Attributes:
        architecture: The family's name in `architectures`, which `Family` adds.
        intermediate_size: Inner features of feed-forward blocks; the largest if they differ, 0 without any.
        num_heads, num_kv_heads, head_dim: Of attention; the largest where layers differ, 0 where none attends.
        rms_norm_eps: Of all normalisations.
        rope, more_ropes: All rotations, as `AttentionShape.rotary` counts them; none where no layer attends.
        max_model_len: Tokens of a sequence, prompt and output together.
        layers: What each layer consists of; none in an encoder.
        eos_token_ids: From `config.json` and `generation_config.json`.
        dtype: In which weights that are not quantized are stored.
        tapped_layers: Layers whose input, the residual stream, is reported to a proposer of drafts.
        num_classes: Classes that the checkpoint's own head scores; 0 without such a head.
        encoder: Of BERT and its descendants, whose layers are described by this alone.
        draft_head: Where the family's checkpoints have a head that predicts further tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters | None
    max_model_len: int
    layers: tuple[LayerTraits, ...]
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    dtype: torch.dtype
    architecture: str = ""
    block: BlockTraits = field(default_factory=BlockTraits)
    more_ropes: tuple[RopeParameters, ...] = ()
    quantization: QuantizationMethod | None = None
    tapped_layers: tuple[int, ...] = ()
    num_classes: int = 0
    encoder: EncoderTraits | None = None
    draft_head: DraftHead | None = None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer, how many tokens a query sees (itself included); None sees all."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(mixer.sliding_window if isinstance(mixer, AttentionShape) else None for mixer in mixers)

    @property
    def ropes(self) -> tuple[RopeParameters, ...]:
        """All rotations, as `AttentionShape.rotary` counts them."""
        return () if self.rope is None else (self.rope, *self.more_ropes)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones, so that a prompt is computed in one step, without a cache."""
        attention = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionShape)]
        return self.encoder is not None or any(mixer.sees_later for mixer in attention)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state of a sequence, which each token changes."""
        return any(isinstance(layer.memory(), KeepsState | KeepsBoth) for layer in self.layers)

    @property
    def has_many_launches(self) -> bool:
        """Whether layers are some 28 kernels on a GPU instead of 11: experts, latent attention, recurrences."""
        plain = (AttentionShape, type(None))
        return any(layer.mixture is not None or not isinstance(layer.mixer, plain) for layer in self.layers)

    @property
    def cache_layout(self) -> CacheLayout:
        """What each layer keeps: nothing in a model that attends in both directions."""
        if self.is_bidirectional:
            return CacheLayout((None,) * self.num_layers)
        return CacheLayout(tuple(layer.memory() for layer in self.layers))

    def layer(self, index: int) -> LayerTraits:
        """What one layer consists of."""
        return self.layers[index]

    def layer_source(
        self, checkpoint: WeightSource, quantized: QuantizedLayers | None = None, *, is_divided: bool = False
    ) -> LayerSource:
        """Return where the weights of layers come from; without `quantized`, linear layers are dense."""
        projections = Projections(checkpoint, quantized, is_divided)
        return LayerSource(checkpoint, projections, self.block, self.hidden_size, self.rms_norm_eps)

    def take_layer(self, source: LayerSource, index: int) -> LayerWeights:
        """Take the weights of one layer."""
        is_bare = index == 0 and self.block.first_is_bare
        return self.layers[index].take(source, f"model.layers.{index}", is_bare=is_bare)

    def attention_shape(self, layer: int) -> AttentionShape:
        """Sizes of one layer's attention, which it must have."""
        mixer = self.layers[layer].mixer
        assert isinstance(mixer, AttentionShape), f"layer {layer} has no attention"
        return mixer


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """Where a family's checkpoints differ from the plain decoder.

    Attributes:
        num_layers, inner_size, activation: Instead of `num_hidden_layers`, `intermediate_size` and `hidden_act`.
        head_dim: What an absent `head_dim` means; None is `hidden_size / num_attention_heads`, as null is everywhere.
        shares_kv_heads: `num_key_value_heads` counts key and value heads; else they are as many as query heads.
        attention: Options of all attention layers; sizes and windows are not read. None where no layer attends.
        layer_windows: Sliding window of each layer; None where no layer has one.
        norm_eps: The field of the normalisations' epsilon, and its default.
        is_tied, rotary_share, rope_theta: Defaults of `tie_word_embeddings`, `partial_rotary_factor`, `rope_theta`.
        rope, max_model_len: Instead of those that the configuration's fields give.
    """

    num_layers: int | None = None
    head_dim: int | None = None
    shares_kv_heads: bool = True
    attention: AttentionShape | None = field(default_factory=AttentionShape)
    layer_windows: tuple[int | None, ...] | None = None
    has_feed_forward: bool = True
    is_gated: bool = True
    mlp_bias: bool = False
    block: BlockTraits = field(default_factory=BlockTraits)
    activation: Activation | None = None
    inner_size: int | None = None
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    is_tied: bool = False
    rotary_share: float = 1.0
    rope_theta: float = 10000.0
    rope: RopeParameters | None = None
    max_model_len: int | None = None


def read_decoder(file: JsonFile, traits: FamilyTraits) -> ModelConfig:
    """Read the fields that all families share."""
    num_layers = traits.num_layers or file.integer("num_hidden_layers", maximum=1024)
    attention, rope = _read_attention(file, traits)
    feed_forward = _read_feed_forward(file, traits)
    heads = attention or AttentionShape()
    generation = _generation_config(file.path.parent)
    return ModelConfig(
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        intermediate_size=0 if feed_forward is None else feed_forward.inner_size,
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=file.number(*traits.norm_eps),
        rope=rope,
        max_model_len=traits.max_model_len or max_model_len(file, rope),
        layers=windowed(attention, feed_forward, traits.layer_windows or (None,) * num_layers),
        tie_word_embeddings=file.boolean("tie_word_embeddings", traits.is_tied),
        eos_token_ids=frozenset(file.token_ids("eos_token_id") + generation.token_ids("eos_token_id")),
        bos_token_id=next(iter(file.token_ids("bos_token_id")), None),
        dtype=read_dtype(file),
        block=traits.block,
        quantization=_quantization(file),
    )


def _read_attention(file: JsonFile, traits: FamilyTraits) -> tuple[AttentionShape | None, RopeParameters | None]:
    if traits.attention is None:
        return None, None
    num_heads = file.integer("num_attention_heads", maximum=1024)
    num_kv_heads = num_heads
    if traits.shares_kv_heads:
        num_kv_heads = file.integer("num_key_value_heads", num_heads, maximum=1024)
    if num_heads % num_kv_heads:
        raise file.error("num_key_value_heads", f"is {num_kv_heads}; it must divide num_attention_heads ({num_heads})")
    head_dim = _head_dim(file, num_heads, traits.head_dim)
    rope, rotary_dim = traits.rope, None
    if rope is None:
        rope = read_rope(file, default_theta=traits.rope_theta)
        rotary_dim = read_rotary_dim(file, head_dim, traits.rotary_share)
        check_rope(file, rope, rotary_dim or head_dim)
    attention = replace(
        traits.attention, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary_dim=rotary_dim
    )
    return attention, rope


def _read_feed_forward(file: JsonFile, traits: FamilyTraits) -> GatedShape | PlainShape | None:
    if not traits.has_feed_forward:
        return None
    inner_size = traits.inner_size or file.integer("intermediate_size")
    activation = traits.activation or read_activation(file)
    return (GatedShape if traits.is_gated else PlainShape)(inner_size, activation, traits.mlp_bias)


def windowed(
    attention: AttentionShape | None, feed_forward: FeedForwardShape | None, windows: Sequence[int | None]
) -> tuple[LayerTraits, ...]:
    """Return layers that are alike but for their sliding windows, which those without attention have not."""
    if attention is None:
        return (LayerTraits(None, feed_forward),) * len(windows)
    return tuple(LayerTraits(replace(attention, sliding_window=window), feed_forward) for window in windows)


def map_attention(config: ModelConfig, change: Callable[[AttentionShape], AttentionShape]) -> ModelConfig:
    """Return a model whose attention layers are changed."""
    layers = [
        replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, AttentionShape) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def biased(
    file: JsonFile, shape: AttentionShape | None = None, *, field: str = "attention_bias", default: bool = False
) -> AttentionShape:
    """Return attention whose projections have biases if the boolean `field`, by default `default`, is true."""
    has_bias = file.boolean(field, default)
    return replace(shape or AttentionShape(), qkv_bias=has_bias, output_bias=has_bias)


def rotate_windows_only(config: ModelConfig) -> ModelConfig:
    """Return a model whose layers without a window do not rotate."""
    return map_attention(config, lambda shape: replace(shape, rotary=None if shape.sliding_window is None else 0))


def with_window_rope(config: ModelConfig, rope: RopeParameters) -> ModelConfig:
    """Return a model whose layers with a window have a rotation of their own."""
    config = map_attention(config, lambda shape: replace(shape, rotary=0 if shape.sliding_window is None else 1))
    return replace(config, more_ropes=(rope,))


def without_rotation(config: ModelConfig, rotates: Sequence[bool]) -> ModelConfig:
    """Return a model of attention layers that rotate only where `rotates` is true."""

    def changed(layer: LayerTraits, is_rotating: bool) -> LayerTraits:
        assert isinstance(layer.mixer, AttentionShape)
        return layer if is_rotating else replace(layer, mixer=replace(layer.mixer, rotary=None))

    return replace(config, layers=tuple(map(changed, config.layers, rotates)))


def read_activation(file: JsonFile, field: str = "hidden_act", default: str = "silu") -> Activation:
    """Read which function a feed-forward block has."""
    name = file.text(field, default)
    if name not in _ACTIVATIONS:
        raise file.error(field, f"is {name[:80]!r}; supported: {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _quantization(file: JsonFile) -> QuantizationMethod | None:
    """Read the quantization, here or in the file that NVIDIA's tool writes beside this one."""
    fields, path = file.fields, file.path.parent / fp8.OWN_FILE
    if fields.get("quantization_config") is None and path.exists():
        file = JsonFile.read(path)
        found = file.nested("quantization") or JsonFile(path, {})
        fields = {"quantization_config": {**found.fields, "quant_method": fp8.MODELOPT}}
    try:
        return read_method(fields)
    except QuantizationError as error:
        raise file.error(error.field, error.problem) from None


def _head_dim(file: JsonFile, num_heads: int, default: int | None) -> int:
    hidden_size = file.integer("hidden_size")
    if file.is_null("head_dim"):
        # `transformers` derives it then, whatever the default of the class is.
        default = None
    if default is None and "head_dim" not in file.names() and hidden_size % num_heads:
        raise file.error("hidden_size", f"is {hidden_size}; it must be a multiple of num_attention_heads ({num_heads})")
    head_dim = file.integer("head_dim", default or max(1, hidden_size // num_heads), minimum=4, maximum=1024)
    if head_dim % 2:
        raise file.error("head_dim", f"is {head_dim}; rotary embeddings need an even number")
    return head_dim


def read_dtype(file: JsonFile) -> torch.dtype:
    """Read the type that the checkpoint's weights are stored in; where no field says it, its files do."""
    field = "dtype" if "dtype" in file.names() else "torch_dtype"
    if field not in file.names():
        return stored_dtype(file.path.parent) or torch.float32
    name = file.text(field)
    if name not in DTYPES:
        raise file.error(field, f"is {name[:80]!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _generation_config(directory: Path) -> JsonFile:
    path = directory / "generation_config.json"
    return JsonFile.read(path) if path.exists() else JsonFile(path, {})


def eviction_problem(config: ModelConfig, max_model_len: int) -> str | None:
    """Return what keeps a model from evicting tokens of sequences of up to `max_model_len`; None where nothing does."""
    if config.is_bidirectional:
        return "it attends in both directions"
    layout = config.cache_layout.within(max_model_len)
    if layout.state_layers:
        return "some of its layers are recurrent"
    if len(layout.groups) > 1:
        return "some of its layers have sliding windows"
    if any(layout.shape_of(layer).is_latent for layer in layout.groups[0].layers):
        return "its attention is latent"
    if config.block.positions is not None:
        return "its positions are learned, and not rotations"
    if any(rope.rope_type is RopeType.DYNAMIC for rope in config.ropes):
        return "its rotations depend on the length of a text (dynamic scaling)"
    return None
