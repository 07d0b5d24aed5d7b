"""Qwen1.5-MoE and Qwen2-MoE: small experts, and one that all tokens get, weighed by a score of its own."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows
from gpu_worker.models.mixture_config import read_num_experts, read_top_k, sparse_layers, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "Qwen2MoeForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "num_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 4), renormalize=file.boolean("norm_topk_prob", False)),
        shared_size=file.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=file.boolean("qkv_bias", True)),
        layer_windows=read_optional_windows(file),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, sparse_layers(file))
