"""Qwen3-MoE: Qwen3 with small experts in place of its feed-forward blocks."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows
from gpu_worker.models.mixture_config import read_num_experts, read_top_k, sparse_layers, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "Qwen3MoeForCausalLM"

SEEING = "qwen3_vl_moe_text"
"""The text part of Qwen3-VL-MoE, whose published experts are stored transposed."""


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. A sliding window, which no published checkpoint has, is one of all layers."""
    attention_bias = file.boolean("attention_bias", False)
    windows = read_uniform_windows(file) if file.boolean("use_sliding_window", False) else None
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 8), renormalize=file.boolean("norm_topk_prob", False)),
        MixtureNames(is_transposed=None if file.text("model_type", "") == SEEING else False),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=attention_bias, output_bias=attention_bias, head_norm=HeadNorm.HEADS),
        layer_windows=windows,
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, sparse_layers(file))
