"""Xiaomi's MiMo V2 Flash."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import NEXTN_FIELD, DraftHead, read_nextn
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, SLIDING, read_layer_flags, read_layer_types
from gpu_worker.models.mixture_config import grouped_sigmoid_rule, mixture_layers, read_num_experts, with_silu_mixtures
from gpu_worker.models.rope_config import max_model_len, read_rope_of, read_rotary_dim

_ROTARY_SHARE = 0.334
_NAMES = TensorNames(
    renamed=((r"\.attention_sink_bias$", ".sinks"), (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm.")),
    # Layers that draft are not part of the model.
    unused=(r"model\.mtp\..*",),
)


def read_mimo_v2_flash(file: JsonFile) -> ModelConfig:
    """Read MiMo V2 Flash: windows with sinks and more key heads; value heads have another size."""
    _refuse(file)
    kinds = _kinds(file)
    ropes = read_rope_of(file, FULL, "rope_theta", 5e6), read_rope_of(file, SLIDING, "swa_rope_theta", 1e4)
    num_experts = read_num_experts(file, "n_routed_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size", 2048),
        grouped_sigmoid_rule(file, num_experts),
        has_choice_bias=True,
    )
    traits = FamilyTraits(
        head_dim=192,
        attention=AttentionShape(
            qkv_bias=file.boolean("attention_bias", False),
            output_scale=1.0 if file.is_null("attention_value_scale") else file.number("attention_value_scale", 0.707),
        ),
        block=BlockTraits(names=_NAMES),
        norm_eps=("layernorm_epsilon" if "layernorm_epsilon" in file.names() else "rms_norm_eps", 1e-5),
        rope=ropes[0],
        max_model_len=max_model_len(file, ropes[0]),
    )
    config = replace(read_decoder(file, traits), more_ropes=ropes[1:])
    # All of them are alike here: the drafting layer has the plain block, and a window.
    drafting = _layer(file, config.layers[-1], SLIDING)
    layers = tuple(_layer(file, layer, kind) for layer, kind in zip(config.layers, kinds, strict=True))
    num_kv_heads = max(layer.mixer.num_kv_heads for layer in layers if isinstance(layer.mixer, AttentionShape))
    config = replace(config, layers=layers, num_kv_heads=num_kv_heads, draft_head=_draft_head(file, drafting))
    return with_silu_mixtures(file, config, shape, _mixture_layers(file))


def _draft_head(file: JsonFile, layer: LayerTraits) -> DraftHead:
    """Return the first of the heads that checkpoints have; published configurations do not count them."""
    prefix = "model.mtp.layers.0"
    return replace(
        read_nextn(file),
        count=file.integer(NEXTN_FIELD, minimum=0, maximum=64) if NEXTN_FIELD in file.names() else None,
        prefix=prefix,
        layer=prefix,
        final_norm="final_layernorm",
        hands_on_normed=True,
        own_layer=layer,
    )


def _layer(file: JsonFile, layer: LayerTraits, kind: str) -> LayerTraits:
    shape = layer.mixer
    assert isinstance(shape, AttentionShape)
    value_dim = file.integer("v_head_dim", 128, minimum=4, maximum=1024)
    if kind == FULL:
        has_sinks = file.boolean("add_full_attention_sink_bias", False)
        rotary_dim = read_rotary_dim(file, shape.head_dim, _ROTARY_SHARE, kind)
        shape = replace(shape, rotary_dim=rotary_dim, value_dim=value_dim, has_sinks=has_sinks)
        return replace(layer, mixer=shape)
    num_kv_heads = file.integer("swa_num_key_value_heads", 2 * shape.num_kv_heads, maximum=1024)
    if shape.num_heads % num_kv_heads:
        problem = f"is {num_kv_heads}; it must divide num_attention_heads ({shape.num_heads})"
        raise file.error("swa_num_key_value_heads", problem)
    window = file.integer("sliding_window", 129)
    if "sliding_window_size" in file.names():
        # Of the tokens before a query.
        window = file.integer("sliding_window_size") + 1
    shape = replace(
        shape,
        num_kv_heads=num_kv_heads,
        sliding_window=window,
        rotary=1,
        rotary_dim=read_rotary_dim(file, shape.head_dim, _ROTARY_SHARE, kind),
        value_dim=value_dim,
        has_sinks=file.boolean("add_swa_attention_sink_bias", True),
    )
    return replace(layer, mixer=shape)


def _kinds(file: JsonFile) -> tuple[str, ...]:
    if not file.integers("hybrid_layer_pattern"):
        return read_layer_types(
            file, (FULL, SLIDING), lambda layer: FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING
        )
    return tuple(SLIDING if flag else FULL for flag in read_layer_flags(file, "hybrid_layer_pattern"))


def _mixture_layers(file: JsonFile) -> frozenset[int]:
    if not file.integers("moe_layer_freq"):
        return mixture_layers(file, 1)
    return frozenset(layer for layer, flag in enumerate(read_layer_flags(file, "moe_layer_freq")) if flag)


def _refuse(file: JsonFile) -> None:
    for name, served in (
        ("attention_projection_layout", "split"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ):
        file.require(name, served)
    file.require("n_shared_experts", 0)
    for name, other in (
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
        ("swa_num_attention_heads", "num_attention_heads"),
    ):
        if name in file.names() and other in file.names() and file.integer(name) != file.integer(other):
            raise file.error(name, f"is {file.integer(name)}; it must be {other} ({file.integer(other)})")


FAMILIES = (Family("MiMoV2FlashForCausalLM", read_mimo_v2_flash, defaults={"num_key_value_heads": 4}),)
