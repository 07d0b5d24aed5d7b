"""OLMoE: many small experts, and queries and keys normalised over all heads at once."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "OlmoeForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 8), renormalize=file.boolean("norm_topk_prob", False)),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(
            qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.WHOLE, qkv_clip=file.optional_number("clip_qkv")
        ),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
