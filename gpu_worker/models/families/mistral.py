"""Mistral, Ministral 1 and 3, Mistral 4, and Mixtral."""

from __future__ import annotations

from typing import Any

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.families.deepseek import read_latent_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows, read_windows
from gpu_worker.models.mixture_config import (
    all_layers,
    later_layers,
    read_groups,
    read_mixture,
    read_num_experts,
    read_top_k,
    with_silu_mixtures,
)
from gpu_worker.models.rope_config import read_query_growth, read_rope
from kernels.moe import RoutingRule


def read_mistral(file: JsonFile) -> ModelConfig:
    """Read Mistral: one sliding window for all layers, 4096 if the field is absent, none if it is null."""
    return read_decoder(file, FamilyTraits(layer_windows=read_uniform_windows(file, 4096)))


def read_ministral(file: JsonFile) -> ModelConfig:
    """Read Ministral (2024, 8B): Mistral with a window in some layers."""
    windows = read_windows(file, lambda _layer: True)
    return read_decoder(file, FamilyTraits(layer_windows=windows))


def read_ministral3(file: JsonFile) -> ModelConfig:
    """Read Ministral 3: Mistral whose queries grow with their position, beyond the length of the first training."""
    traits = FamilyTraits(
        head_dim=128,
        attention=AttentionShape(query_growth=read_query_growth(file)),
        layer_windows=read_uniform_windows(file),
        norm_eps=("rms_norm_eps", 1e-5),
        max_model_len=file.integer("max_position_embeddings"),
    )
    return read_decoder(file, traits)


def read_mistral4(file: JsonFile) -> ModelConfig:
    """Read Mistral 4: DeepSeek's latent attention and experts by softmax, and queries that grow with their position."""
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
    traits = FamilyTraits(rope=read_rope(file), max_model_len=file.integer("max_position_embeddings"))
    config = read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
    return with_silu_mixtures(file, config, shape, later_layers(file, 0))


NAMES = MixtureNames(
    router=("block_sparse_moe.gate", "mlp.gate"),
    experts=("block_sparse_moe.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
)


def read_mixtral(file: JsonFile) -> ModelConfig:
    """Read Mixtral: experts in every layer, two of eight for a token, whose weights add up to one."""
    shape = read_mixture(file, ("num_local_experts",), 2, renormalize=True, names=NAMES)
    traits = FamilyTraits(layer_windows=read_uniform_windows(file), rope_theta=1e6)
    config = read_decoder(file, traits)
    return with_silu_mixtures(file, config, shape, all_layers(file))


def _rope(theta: float, *, factor: float, original_len: int) -> dict[str, Any]:
    """Return what an absent rotation means."""
    yarn = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    length = {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original_len}
    return {**yarn, **length, "llama_4_scaling_beta": 0.1}


FAMILIES = (
    Family("MistralForCausalLM", read_mistral, defaults={"num_key_value_heads": 8}),
    Family("MinistralForCausalLM", read_ministral, defaults={"num_key_value_heads": 8}),
    Family(
        "Ministral3ForCausalLM",
        read_ministral3,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.1,
            },
        },
        defaults={"num_key_value_heads": 8, "rope_parameters": _rope(1e6, factor=16.0, original_len=16384)},
    ),
    Family(
        "Mistral4ForCausalLM",
        read_mistral4,
        defaults={
            "q_lora_rank": 1024,
            "rope_parameters": _rope(10000.0, factor=128.0, original_len=8192) | {"partial_rotary_factor": 0.5},
        },
    ),
    Family("MixtralForCausalLM", read_mixtral, defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
)
