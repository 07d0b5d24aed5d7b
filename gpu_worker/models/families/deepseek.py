"""DeepSeek V2, V3, V3.1 and R1, and the models of their form: Kimi K2, GLM-4.7-Flash and Youtu-LLM."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import score_scale
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import (
    later_layers,
    mixture_layers,
    read_grouped_sigmoid,
    read_groups,
    read_num_experts,
    read_top_k,
    with_silu_mixtures,
)
from gpu_worker.models.rope_config import read_query_growth
from kernels.moe import RoutingRule

MAX_KEY_DIM, MAX_LATENT_DIM = 576, 512
"""The most features that attention kernels take: in a row of the cache, and in the part of it that values are."""


def read_latent_decoder(file: JsonFile, traits: FamilyTraits, *, is_interleaved: bool) -> ModelConfig:
    """Read a decoder whose layers attend by latent vectors."""
    rotary_dim = file.integer("qk_rope_head_dim", maximum=MAX_KEY_DIM)
    config = read_decoder(file, replace(traits, head_dim=rotary_dim))
    plain_dim = file.integer("qk_nope_head_dim", maximum=MAX_KEY_DIM)
    assert config.rope is not None, "families with latent attention rotate"
    shape = LatentShape(
        num_heads=config.num_heads,
        query_rank=file.integer("q_lora_rank") if "q_lora_rank" in file.names() else None,
        latent_dim=file.integer("kv_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=file.integer("v_head_dim", maximum=MAX_LATENT_DIM),
        scale=(plain_dim + rotary_dim) ** -0.5 * score_scale(config.rope),
        interleaved=is_interleaved,
        has_bias=file.boolean("attention_bias", False),
        query_growth=read_query_growth(file),
    )
    _check_sizes(file, shape)
    layers = tuple(replace(layer, mixer=shape) for layer in config.layers)
    return replace(config, layers=layers, num_kv_heads=1, head_dim=shape.key_dim)


def _check_sizes(file: JsonFile, shape: LatentShape) -> None:
    if shape.rotary_dim % 2:
        raise file.error("qk_rope_head_dim", f"is {shape.rotary_dim}; rotary embeddings need an even number")
    if shape.latent_dim > MAX_LATENT_DIM:
        raise file.error("kv_lora_rank", f"is {shape.latent_dim}; attention takes up to {MAX_LATENT_DIM}")
    if shape.key_dim > MAX_KEY_DIM:
        problem = f"and kv_lora_rank are {shape.key_dim} together; attention takes up to {MAX_KEY_DIM}"
        raise file.error("qk_rope_head_dim", problem)


def read_deepseek_v2(file: JsonFile) -> ModelConfig:
    """Read DeepSeek V2 and V2-Lite: attention by latent vectors, and mixtures behind the first layers."""
    num_experts = read_num_experts(file, "n_routed_experts", "num_experts")
    inner = file.integer("moe_intermediate_size")
    shape = MixtureShape(
        num_experts,
        inner,
        _read_rule(file, num_experts),
        MixtureNames(shared="mlp.shared_experts"),
        shared_size=inner * file.integer("n_shared_experts", 2, minimum=0),
    )
    config = read_latent_decoder(file, FamilyTraits(), is_interleaved=True)
    return with_silu_mixtures(file, config, shape, later_layers(file, 0))


def _read_rule(file: JsonFile, num_experts: int) -> RoutingRule:
    """Read the rule: the best experts of all, or those of the groups whose best expert is best."""
    file.require("norm_topk_prob", False, "weights of experts that are not normalised")
    top_k, scale = read_top_k(file, num_experts), file.number("routed_scaling_factor", 1.0)
    method = file.text("topk_method", "greedy")
    if method == "greedy":
        return RoutingRule(top_k, scale=scale)
    if method != "group_limited_greedy":
        raise file.error("topk_method", f"is {method[:80]!r}; supported: 'greedy', 'group_limited_greedy'")
    num_groups, top_k_groups = read_groups(file, num_experts, top_k)
    return RoutingRule(top_k, num_groups=num_groups, top_k_groups=top_k_groups, scale=scale)


# What `transformers` 5 calls the layers of Kimi K2.5 where it saves them; published checkpoints have the usual name.
_RENAMED = ((r"^model\.blocks\.", "model.layers."),)


def read_deepseek_v3(file: JsonFile) -> ModelConfig:
    """Read DeepSeek V3 and its like: latent attention; behind the first layers, grouped routing with a bias."""
    names = TensorNames(renamed=_RENAMED, unused=nextn_tensors(file))
    traits = FamilyTraits(block=BlockTraits(names=names))
    config = read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
    config = with_silu_mixtures(file, config, read_grouped_sigmoid(file), mixture_layers(file, 3))
    return replace(config, draft_head=read_nextn(file))


def read_youtu(file: JsonFile) -> ModelConfig:
    """Read Youtu-LLM: DeepSeek V3's latent attention in a dense decoder."""
    traits = FamilyTraits(is_tied=True)
    return read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))


FAMILIES = (
    Family("DeepseekV2ForCausalLM", read_deepseek_v2, defaults={"q_lora_rank": 1536}),
    Family(
        "DeepseekV3ForCausalLM",
        read_deepseek_v3,
        defaults={"q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    ),
    Family(
        "Glm4MoeLiteForCausalLM",
        read_deepseek_v3,
        defaults={
            "q_lora_rank": 768,
            "routed_scaling_factor": 1.8,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    Family("YoutuForCausalLM", read_youtu, defaults={"q_lora_rank": 1536}),
)
