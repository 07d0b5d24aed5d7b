"""Liquid's LFM2, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.short_conv import ShortConvShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types
from gpu_worker.models.mixture_config import later_layers, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.recurrent_config import MAX_CONV_WIDTH, with_mixers
from kernels.moe import RoutingRule

_KINDS = ("conv", "full_attention")
# Published models have at most 1.
_MAX_MULTIPLIER = 64
_NAMES = TensorNames(
    before_mixer="operator_norm",
    before_feed_forward="ffn_norm",
    renamed=(
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.q_layernorm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.k_layernorm\.", ".self_attn.k_norm."),
        (r"\.feed_forward\.", ".mlp."),
        (r"^model\.embedding_norm\.", "model.norm."),
    ),
)


def read_lfm2(file: JsonFile) -> ModelConfig:
    """Read LFM2: gated short convolutions in most layers, attention with normalised heads in the others."""
    traits = replace(lfm2_traits(file), inner_size=_inner_size(file))
    return with_convolutions(file, read_decoder(file, traits))


def lfm2_traits(file: JsonFile) -> FamilyTraits:
    """Return the traits that LFM2's models share."""
    return FamilyTraits(
        attention=AttentionShape(head_norm=HeadNorm.HEADS),
        block=BlockTraits(names=_NAMES),
        norm_eps=("norm_eps", 1e-5),
        is_tied=file.boolean("tie_embedding", True),
        rope_theta=1e6,
    )


def with_convolutions(file: JsonFile, config: ModelConfig) -> ModelConfig:
    """Return a model with convolutions in its layers of that kind."""
    width = file.integer("conv_L_cache", 3, minimum=2, maximum=MAX_CONV_WIDTH)
    conv = ShortConvShape(config.hidden_size, width, file.boolean("conv_bias", False))
    return with_mixers(config, _types(file), {_KINDS[0]: conv})


def _types(file: JsonFile) -> tuple[str, ...]:
    """Read the kind of each layer: where nothing is said, all attend."""
    attending = file.integers("full_attn_idxs") if "full_attn_idxs" in file.names() else range(1024)
    return read_layer_types(file, _KINDS, lambda layer: _KINDS[layer in attending])


def _inner_size(file: JsonFile) -> int:
    """Return the size of the feed-forward block, which is two thirds of what the configuration says, rounded up.

    The first release says it in a field of its own, and has no other.
    """
    size = file.integer("block_ff_dim" if "block_ff_dim" in file.names() else "intermediate_size")
    if not file.boolean("block_auto_adjust_ff_dim", True):
        return size
    multiplier = file.number("block_ffn_dim_multiplier", 1.0)
    if multiplier > _MAX_MULTIPLIER:
        raise file.error("block_ffn_dim_multiplier", f"is {multiplier:g}; it must be at most {_MAX_MULTIPLIER}")
    size = int(multiplier * int(2 * size / 3))
    multiple = file.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


_MIXTURE = MixtureNames(matrices=("w1", "w3", "w2"), choice_bias="mlp.expert_bias")


def read_lfm2_moe(file: JsonFile) -> ModelConfig:
    """Read LFM2-MoE: LFM2 with sigmoid routing behind the first layers."""
    config = with_convolutions(file, read_decoder(file, lfm2_traits(file)))
    num_experts = read_num_experts(file, "num_experts")
    rule = RoutingRule(
        read_top_k(file, num_experts, 4),
        score="sigmoid",
        renormalize=file.boolean("norm_topk_prob", True),
        scale=file.number("routed_scaling_factor", 1.0),
    )
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size", 1792),
        rule,
        _MIXTURE,
        has_choice_bias=file.boolean("use_expert_bias", True),
    )
    return with_silu_mixtures(file, config, shape, later_layers(file, 2, "num_dense_layers"))


FAMILIES = (
    Family("Lfm2ForCausalLM", read_lfm2, {"full_attn_idxs": [2]}, defaults={"num_key_value_heads": 8}),
    Family("Lfm2MoeForCausalLM", read_lfm2_moe, {"full_attn_idxs": [2]}, defaults={"num_key_value_heads": 8}),
)
