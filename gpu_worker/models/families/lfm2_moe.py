"""LFM2-MoE: LFM2 with sigmoid routing behind the first layers."""

from __future__ import annotations

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families import lfm2
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "Lfm2MoeForCausalLM"
SAMPLE = {"full_attn_idxs": [2]}

_MIXTURE = MixtureNames(matrices=("w1", "w3", "w2"), choice_bias="mlp.expert_bias")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    config = lfm2.with_convolutions(file, read_decoder(file, lfm2.lfm2_traits(file, ARCHITECTURE)))
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
    first = file.integer("num_dense_layers", 2, minimum=0)
    return with_silu_mixtures(file, config, shape, frozenset(layer for layer in all_layers(file) if layer >= first))
