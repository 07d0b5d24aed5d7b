"""FlexOlmo: OLMo 2's layers with experts in place of its feed-forward blocks."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.olmo2 import olmo_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "FlexOlmoForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 5), renormalize=file.boolean("norm_topk_prob", False)),
    )
    traits = replace(olmo_traits(file, ARCHITECTURE), norm_eps=("rms_norm_eps", 1e-6), rope_theta=500_000.0)
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
