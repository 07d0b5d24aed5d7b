"""Qwen3.5-MoE and 3.6 (text part): Qwen3.5 with small experts, and one that all tokens get, in all layers."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, with_silu_mixtures
from gpu_worker.models.qwen_hybrid import read_hybrid_decoder, read_shared_mixture

ARCHITECTURE = "Qwen3_5MoeForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    config = read_hybrid_decoder(file, ARCHITECTURE, by_key_head=False, inner_size="moe_intermediate_size")
    return with_silu_mixtures(file, config, read_shared_mixture(file, top_k=8, renormalize=True), all_layers(file))
