"""Mistral 4: DeepSeek's latent attention and experts by softmax, and queries that grow with their position."""

from __future__ import annotations

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.latent_config import read_latent_decoder
from gpu_worker.models.mixture_config import later_layers, read_groups, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import read_rope
from kernels.moe import RoutingRule

ARCHITECTURE = "Mistral4ForCausalLM"
SAMPLE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
    }
}


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "n_routed_experts", "num_local_experts")
    top_k, inner = read_top_k(file, num_experts, 4), file.integer("moe_intermediate_size")
    num_groups, top_k_groups = read_groups(file, num_experts, top_k, 1)
    rule = RoutingRule(
        top_k,
        renormalize=file.boolean("norm_topk_prob", True),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score="top2",
        scale=file.number("routed_scaling_factor", 1.0),
    )
    shape = MixtureShape(
        num_experts,
        inner,
        rule,
        MixtureNames(shared="mlp.shared_experts"),
        shared_size=inner * file.integer("n_shared_experts", 1, minimum=0),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        rope=read_rope(file),
        max_model_len=file.integer("max_position_embeddings"),
    )
    config = read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
    return with_silu_mixtures(file, config, shape, later_layers(file, 0))
