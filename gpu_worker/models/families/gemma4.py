"""Google's Gemma 4 (text)."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, LayerInputShape, TensorNames
from gpu_worker.layers.dense_and_mixture import DenseAndMixtureShape
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.families import Family, gemma
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import read_num_experts, read_top_k
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope, rope_fields
from kernels.activation import Activation
from kernels.activation.experts import GELU_TANH
from kernels.moe import RoutingRule

_ACTIVATION = "gelu_pytorch_tanh"


def read_gemma4(file: JsonFile) -> ModelConfig:
    """Read Gemma 4 (text): Gemma 3 with larger heads and shared projections where layers have no window.

    Its small models (E2B, E4B) give each layer a vector of the token, and their last layers read keys and values of
    earlier ones. Its mixture (26B-A4B) has experts beside the block that all tokens get.
    """
    _refuse(file)
    length = file.integer("max_position_embeddings", 131072)
    activation = read_activation(file, "hidden_activation", _ACTIVATION)
    by_type = has_ropes_by_type(file)
    if not by_type and rope_fields(file).names():
        raise rope_fields(file).error(
            "rope_type", "is of all layers; supported: rope_parameters for each kind of layer"
        )
    full = RopeParameters(RopeType.PROPORTIONAL, 1e6, length, turning_share=0.25)
    sliding = RopeParameters(RopeType.DEFAULT, 1e4, length)
    traits = FamilyTraits(
        head_dim=256,
        attention=AttentionShape(scale=1.0, head_norm=HeadNorm.HEADS, value_norm=True),
        layer_windows=(*read_windows(file, all_but_every(6), 512)[:-1], None),
        block=BlockTraits(
            names=_names(file),
            embedding_scale=file.integer("hidden_size") ** 0.5,
            logit_soft_cap=gemma.read_soft_cap(file, "final_logit_softcapping", None),
            layer_inputs=_layer_inputs(file, activation),
        ),
        activation=activation,
        is_tied=True,
        rope=read_rope(file, "full_attention") if by_type else full,
        max_model_len=length,
    )
    config = replace(
        read_decoder(file, traits), more_ropes=(read_rope(file, "sliding_attention") if by_type else sliding,)
    )
    shares = file.boolean("attention_k_eq_v", False)
    layers = [replace(layer, mixer=_attention(file, index, layer, shares)) for index, layer in enumerate(config.layers)]
    config = _with_experts(file, _shared(file, replace(config, layers=tuple(layers))))
    return replace(config, head_dim=max(config.attention_shape(index).head_dim for index in range(config.num_layers)))


def _layer_inputs(file: JsonFile, activation: Activation) -> LayerInputShape | None:
    size = file.integer("hidden_size_per_layer_input", 256, minimum=0, maximum=1 << 16)
    if size == 0:
        return None
    vocab_size, num_tokens = file.integer("vocab_size_per_layer_input", 262144), file.integer("vocab_size")
    if vocab_size < num_tokens:
        problem = f"is {vocab_size}; every token needs a row: at least vocab_size ({num_tokens})"
        raise file.error("vocab_size_per_layer_input", problem)
    # `transformers` reads padding where images are.
    padding = file.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1)
    return LayerInputShape(size, vocab_size, activation, padding)


def _names(file: JsonFile) -> TensorNames:
    names = replace(gemma.NAMES, stream_scale="layer_scalar", unused=_unused(file))
    # Both blocks of a layer with experts read the stream by normalisations of their own.
    return replace(names, before_feed_forward=None) if _has_experts(file) else names


def _has_experts(file: JsonFile) -> bool:
    return file.boolean("enable_moe_block", False)


def _with_experts(file: JsonFile, config: ModelConfig) -> ModelConfig:
    if not _has_experts(file):
        return config
    file.require("hidden_activation", _ACTIVATION, "with experts")
    num_experts = read_num_experts(file, "num_experts")
    top_k = read_top_k(file, num_experts, name="top_k_experts")
    mixture = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        RoutingRule(top_k, renormalize=True),
        MixtureNames(
            router=("router.proj",), experts=("experts",), stacked=(("experts.gate_up_proj", "experts.down_proj"),)
        ),
        GELU_TANH,
        scales="router.per_expert_scale",
    )
    layers = []
    for layer in config.layers:
        assert isinstance(layer.feed_forward, GatedShape)
        layers.append(replace(layer, feed_forward=DenseAndMixtureShape(layer.feed_forward, mixture)))
    return replace(config, layers=tuple(layers))


def _unused(file: JsonFile) -> tuple[str, ...]:
    """Return patterns of the projections to keys and values that some checkpoints have where nothing reads them."""
    num_layers, count = file.integer("num_hidden_layers", maximum=1024), _num_shared(file)
    return tuple(rf"model\.layers\.{layer}\.self_attn\.[kv]_.*" for layer in range(num_layers - count, num_layers))


def _num_shared(file: JsonFile) -> int:
    return file.integer("num_kv_shared_layers", 0, minimum=0, maximum=1024)


def _shared(file: JsonFile, config: ModelConfig) -> ModelConfig:
    """Return the model whose last layers read the keys and values of the last layer of their kind before them.

    Their feed-forward blocks may be twice as wide.
    """
    count = _num_shared(file)
    if count == 0:
        return config
    first = config.num_layers - count
    kinds = [window is None for window in config.layer_windows]
    if not set(kinds) <= set(kinds[: max(first, 0)]):
        problem = f"is {count}; each kind of layer needs one before the last {count} of {config.num_layers} layers"
        raise file.error("num_kv_shared_layers", problem)
    factor = 2 if file.boolean("use_double_wide_mlp", False) else 1
    inner_size = factor * config.intermediate_size
    layers = list(config.layers)
    for index in range(first, config.num_layers):
        source = max(layer for layer in range(first) if kinds[layer] == kinds[index])
        shape, block = config.attention_shape(index), layers[index].feed_forward
        assert isinstance(block, GatedShape)
        read = config.attention_shape(source)
        if (shape.head_dim, shape.num_kv_heads) != (read.head_dim, read.num_kv_heads):
            raise file.error("per_layer_config", f"gives layer {index} other heads than layer {source}, which it reads")
        mixer = replace(shape, reads_layer=source, value_norm=False, values_are_keys=False)
        layers[index] = LayerTraits(mixer, replace(block, inner_size=inner_size))
    return replace(config, layers=tuple(layers), intermediate_size=inner_size)


def _attention(file: JsonFile, index: int, layer: LayerTraits, shares: bool) -> AttentionShape:
    shape = layer.mixer
    assert isinstance(shape, AttentionShape)
    is_full = shape.sliding_window is None
    shape = replace(shape, rotary=0 if is_full else 1, values_are_keys=shares and is_full, joins_images=not is_full)
    overrides = file.nested("per_layer_config")
    if overrides is not None:
        # `transformers` puts zeros before the numbers, so that all are as long as the longest.
        named = next((name for name in overrides.names() if name.isdecimal() and int(name) == index), "")
        return _overridden(shape, overrides.nested(named) or JsonFile(file.path, {}))
    if not is_full:
        return shape
    num_kv_heads = shape.num_kv_heads
    if shares:
        num_kv_heads = file.integer("num_global_key_value_heads", num_kv_heads, maximum=1024)
    head_dim = file.integer("global_head_dim", 512, minimum=4, maximum=1024)
    return replace(shape, head_dim=head_dim, num_kv_heads=num_kv_heads)


def _overridden(shape: AttentionShape, fields: JsonFile) -> AttentionShape:
    for name in fields.names() - {"head_dim", "num_key_value_heads"}:
        raise fields.error(name, "is set for one layer; supported for one layer: head_dim, num_key_value_heads")
    head_dim = fields.integer("head_dim", shape.head_dim, minimum=4, maximum=1024)
    return replace(
        shape, head_dim=head_dim, num_kv_heads=fields.integer("num_key_value_heads", shape.num_kv_heads, maximum=1024)
    )


def _refuse(file: JsonFile) -> None:
    name = "use_bidirectional_attention"
    if file.text(name, "vision") == "all":
        raise file.error(name, "is 'all'; supported: 'vision', by which text attends to earlier tokens")


FAMILIES = (Family("Gemma4ForCausalLM", read_gemma4, defaults={"num_key_value_heads": 4}),)
