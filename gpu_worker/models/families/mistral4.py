"""Mistral 4: DeepSeek's latent attention and experts by softmax, and queries that grow with their position."""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.layers.mixture_shape import MixtureNames, MixtureShape
from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.latent_config import read_latent_decoder
from gpu_worker.models.mixture_config import later_layers, read_groups, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import read_rope
from gpu_worker.models.text_part import text_names, text_part
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

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1048576,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration, of the text part where there is a vision tower."""
    file = text_part(file, _TEXT)
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
        block=BlockTraits(names=text_names(TensorNames())),
        rope=read_rope(file),
        max_model_len=file.integer("max_position_embeddings"),
    )
    config = read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
    return with_silu_mixtures(file, config, shape, later_layers(file, 0))
