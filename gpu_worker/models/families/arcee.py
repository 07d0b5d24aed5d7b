"""Arcee's models: AFM and AFMoE (Trinity)."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import (
    FamilyTraits,
    ModelConfig,
    biased,
    read_activation,
    read_decoder,
    rotate_windows_only,
)
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import later_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule


def read_arcee(file: JsonFile) -> ModelConfig:
    """Read Arcee (AFM): Llama whose feed-forward blocks have squared ReLU and no gate."""
    traits = FamilyTraits(
        attention=biased(file),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", False),
        activation=read_activation(file, default="relu2"),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)


_NAMES = TensorNames(
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_mlp_layernorm",
    after_feed_forward="post_mlp_layernorm",
    qkv=("q_proj", "gate_proj", "k_proj", "v_proj"),
)
_MIXTURE = MixtureNames(router=("mlp.router.gate",), choice_bias="mlp.expert_bias", shared="mlp.shared_experts")


def read_afmoe(file: JsonFile) -> ModelConfig:
    """Read AFMoE: gated attention, rotated in its windows alone, norms around blocks, sigmoid routing."""
    _refuse(file)
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    inner_size = file.integer("moe_intermediate_size", 1408)
    scale = file.number("route_scale", 1.0)
    shape = MixtureShape(
        num_experts,
        inner_size,
        RoutingRule(read_top_k(file, num_experts, 6), score="sigmoid", renormalize=True, scale=scale),
        _MIXTURE,
        has_choice_bias=True,
        shared_size=inner_size * file.integer("num_shared_experts", 2),
    )
    traits = FamilyTraits(
        head_dim=128,
        attention=AttentionShape(head_norm=HeadNorm.HEADS, output_gate=True, has_gate_matrix=True),
        layer_windows=read_windows(file, all_but_every(file.integer("global_attn_every_n_layers", 4)), 1024),
        block=BlockTraits(
            names=_NAMES,
            embedding_scale=file.integer("hidden_size") ** 0.5 if file.boolean("mup_enabled", False) else 1.0,
        ),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = rotate_windows_only(read_decoder(file, traits))
    return with_silu_mixtures(file, config, shape, later_layers(file, 1, "num_dense_layers"))


def _refuse(file: JsonFile) -> None:
    file.require("attention_bias", False, "projections without biases")
    file.require("score_func", "sigmoid")
    file.require("route_norm", True, "weights of a token's experts that sum to one")
    for name in ("n_group", "topk_group"):
        file.require(name, 1, "all experts in one group")


FAMILIES = (Family("ArceeForCausalLM", read_arcee), Family("AfmoeForCausalLM", read_afmoe))
