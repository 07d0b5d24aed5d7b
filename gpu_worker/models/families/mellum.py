"""Mellum 2: Qwen3-MoE with windows in some layers, which rotate by another base, and dense blocks in some."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, map_attention, read_decoder
from gpu_worker.models.families.deepseek_v3 import mixture_layers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows
from gpu_worker.models.mixture_config import read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import max_model_len, read_rope
from kernels.moe import RoutingRule

ARCHITECTURE = "MellumForCausalLM"

# Of the layer that drafts, which is no part of the model.
_NAMES = TensorNames(unused=(r"mtp\..*",))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size", 896),
        RoutingRule(read_top_k(file, num_experts, 8), renormalize=file.boolean("norm_topk_prob", True)),
    )
    full, sliding = read_rope(file, "full_attention", default_theta=5e5), read_rope(file, "sliding_attention")
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS),
        layer_windows=read_windows(file, lambda _layer: False, default=1024),
        block=BlockTraits(names=_NAMES),
        rope=full,
        max_model_len=max_model_len(file, full),
    )
    config = replace(read_decoder(file, traits), more_ropes=(sliding,))
    config = map_attention(config, lambda shape: replace(shape, rotary=0 if shape.sliding_window is None else 1))
    return with_silu_mixtures(file, config, shape, mixture_layers(file, 0))
