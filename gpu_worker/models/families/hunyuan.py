"""Tencent's Hunyuan, dense and with experts, and Hunyuan 3 (HY3)."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import (
    check_silu,
    mixture_layers,
    read_by_layer,
    read_num_experts,
    read_top_k,
    with_silu_mixtures,
)
from gpu_worker.models.rope_config import max_model_len, read_rope, rope_fields
from kernels.moe import RoutingRule

# Published models have 1000.
_MAX_ALPHA = 1e6
_NAMES = TensorNames(renamed=((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm.")))


def read_hunyuan_v1_dense(file: JsonFile) -> ModelConfig:
    """Read Hunyuan (dense): heads that are normalised behind the rotation, whose base a constant may stretch."""
    return read_decoder(file, hunyuan_traits(file))


def hunyuan_traits(file: JsonFile) -> FamilyTraits:
    """Return the traits that Hunyuan's first models share."""
    rope = _read_rope(file)
    return FamilyTraits(
        attention=biased(file, AttentionShape(head_norm=HeadNorm.ROTATED)),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
        rope=rope,
        max_model_len=max_model_len(file, rope),
    )


def _read_rope(file: JsonFile) -> RopeParameters:
    """Read the rotation: with `alpha`, the form called dynamic has a base that no length changes."""
    fields, rope = rope_fields(file), read_rope(file)
    if rope.rope_type is not RopeType.DYNAMIC or "alpha" not in fields.names():
        # The normalisation behind the rotation undoes what that multiplies by.
        return replace(rope, attention_factor=1.0)
    heads = file.integer("num_attention_heads", maximum=1024)
    dim = file.integer("head_dim", max(4, file.integer("hidden_size") // heads), minimum=4, maximum=1024)
    alpha = fields.number("alpha")
    if alpha > _MAX_ALPHA:
        raise fields.error("alpha", f"is {alpha:g}; it must be at most {_MAX_ALPHA:g}")
    theta = rope.theta * alpha ** (dim / (dim - 2))
    return RopeParameters(RopeType.DEFAULT, theta, rope.original_max_len)


_MIXTURE = MixtureNames(router=("mlp.gate.wg",), shared="mlp.shared_mlp")


def read_hunyuan_v1_moe(file: JsonFile) -> ModelConfig:
    """Read Hunyuan (mixtures, A13B): experts beside a shared one in every layer, counted once or by layer."""
    file.require("use_cla", False, "layers with keys and values of their own")
    check_silu(file)
    inner_size = file.integer("intermediate_size")
    if set(read_by_layer(file, "moe_intermediate_size", inner_size)) != {inner_size}:
        raise file.error("moe_intermediate_size", "differs from intermediate_size; supported: the same for all experts")
    config = read_decoder(file, hunyuan_traits(file))
    top_k = "moe_topk" if "moe_topk" in file.names() else "num_experts_per_tok"
    numbers = (
        read_by_layer(file, name, default)
        for name, default in (("num_experts", None), (top_k, 1), ("num_shared_expert", 1))
    )
    layers = [
        replace(layer, feed_forward=_mixture(file, inner_size, *counts))
        for layer, counts in zip(config.layers, zip(*numbers, strict=True), strict=True)
    ]
    return replace(config, layers=tuple(layers))


def _mixture(file: JsonFile, inner_size: int, num_experts: int, top_k: int, num_shared: int) -> MixtureShape:
    if top_k > num_experts:
        raise file.error("moe_topk", f"is {top_k}; there are {num_experts} experts")
    rule = RoutingRule(top_k, renormalize=True)
    return MixtureShape(num_experts, inner_size, rule, _MIXTURE, shared_size=inner_size * num_shared)


# Published names, where they are not those of `transformers`.
_RENAMED = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)


def read_hy_v3(file: JsonFile) -> ModelConfig:
    """Read Hunyuan 3: Qwen3's attention; behind the first layer, sigmoid routing with a bias and a shared expert."""
    mlp_bias = file.boolean("mlp_bias", False)
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    inner_size = file.integer("moe_intermediate_size", 1536)
    scale = file.number("router_scaling_factor", 2.826)
    shape = MixtureShape(
        num_experts,
        inner_size,
        RoutingRule(read_top_k(file, num_experts, 8), score="sigmoid", renormalize=True, scale=scale),
        MixtureNames(shared="mlp.shared_experts"),
        has_choice_bias=True,
        shared_size=inner_size * file.integer("num_shared_experts", 1),
        has_shared_biases=mlp_bias,
    )
    traits = FamilyTraits(
        head_dim=128,
        attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)),
        mlp_bias=mlp_bias,
        block=BlockTraits(names=TensorNames(renamed=_RENAMED, unused=nextn_tensors(file))),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=11_158_840.0,
    )
    config = with_silu_mixtures(file, read_decoder(file, traits), shape, mixture_layers(file, 1))
    # Its head for the vocabulary is stored and not used: that is the model's.
    copied = ("embed_tokens", "shared_head")
    head = replace(read_nextn(file), final_norm="final_layernorm", hands_on_normed=True, copied=copied)
    return replace(config, draft_head=head)


FAMILIES = (
    Family("HunYuanDenseV1ForCausalLM", read_hunyuan_v1_dense),
    Family("HunYuanMoEV1ForCausalLM", read_hunyuan_v1_moe, {"moe_topk": 2, "moe_intermediate_size": 512}),
    Family("HYV3ForCausalLM", read_hy_v3, defaults={"num_key_value_heads": 8}),
)
