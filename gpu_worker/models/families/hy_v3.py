"""Hunyuan 3 (HY3): Qwen3's attention, and behind the first layer sigmoid routing with a bias beside a shared expert."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.families.deepseek_v3 import mixture_layers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "HYV3ForCausalLM"

# Published names, where they are not those of `transformers`.
_RENAMED = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. The layer behind the last one drafts, and is no part of the model."""
    bias, mlp_bias = file.boolean("attention_bias", False), file.boolean("mlp_bias", False)
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
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS),
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
