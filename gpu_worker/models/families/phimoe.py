"""Phi-3.5-MoE: two experts a token by a sparse mixer, LayerNorm, LongRoPE, biases of attention and of the head."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import max_model_len, read_rope, rope_fields
from kernels.moe import RoutingRule

ARCHITECTURE = "PhiMoEForCausalLM"
ALSO = ("PhimoeForCausalLM",)
SAMPLE = {
    "num_experts_per_tok": 2,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 2048,
    },
}

_MIXTURE = MixtureNames(
    router=("block_sparse_moe.gate", "mlp.router"),
    experts=("block_sparse_moe.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "num_local_experts")
    top_k = read_top_k(file, num_experts, 2)
    if top_k != 2:
        raise file.error("num_experts_per_tok", f"is {top_k}; a sparse mixer chooses 2")
    jitter = file.number("router_jitter_noise", 0.01)
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(2, score="sparse_mixer", jitter=jitter),
        _MIXTURE,
    )
    bias = file.boolean("attention_bias", False)
    rope = _read_rope(file)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        layer_windows=read_uniform_windows(file),
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), has_head_bias=file.boolean("lm_head_bias", False)
        ),
        norm_eps=("rms_norm_eps", 1e-5),
        rope=rope,
        max_model_len=max_model_len(file, rope),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


def _read_rope(file: JsonFile) -> RopeParameters:
    """Read the rotation, which has an amplitude for short sequences and one for long ones."""
    rope = read_rope(file)
    if rope.rope_type is not RopeType.LONGROPE:
        return rope
    fields = rope_fields(file)
    short, long = fields.number("short_mscale"), fields.number("long_mscale")
    return replace(rope, attention_factor=short, long_attention_factor=long)
