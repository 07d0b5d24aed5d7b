"""dots.llm1: Qwen3's attention, and DeepSeek V3's routing behind the first layers."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows
from gpu_worker.models.mixture_config import grouped_sigmoid_rule, later_layers, read_num_experts, with_silu_mixtures

ARCHITECTURE = "Dots1ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    first_window = file.integer("max_window_layers", 62, minimum=0)
    num_experts = read_num_experts(file, "n_routed_experts")
    inner_size = file.integer("moe_intermediate_size", 1408)
    rule = grouped_sigmoid_rule(file, num_experts)
    shape = MixtureShape(
        num_experts,
        inner_size,
        replace(rule, renormalize=file.boolean("norm_topk_prob", False)),
        MixtureNames(shared="mlp.shared_experts"),
        has_choice_bias=True,
        shared_size=inner_size * file.integer("n_shared_experts", 1, minimum=0),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS),
        layer_windows=read_windows(file, lambda layer: layer >= first_window),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, later_layers(file, 0))
