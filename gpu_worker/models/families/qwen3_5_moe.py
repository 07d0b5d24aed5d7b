"""Qwen3.5-MoE and 3.6 (text part): Qwen3.5 with small experts, and one that all tokens get, in all layers."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.hybrid_config import read_gated_delta, read_layer_types, with_mixers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, with_mixtures
from gpu_worker.models.qwen_hybrid import HYBRID_TYPES, read_gated_attention_decoder, read_shared_mixture
from gpu_worker.models.text_part import text_part

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
ALSO = ("Qwen3_5MoeForConditionalGeneration",)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file)
    config = read_gated_attention_decoder(file, ARCHITECTURE, "moe_intermediate_size")
    types = read_layer_types(file, HYBRID_TYPES, interval=4)
    config = with_mixers(config, types, {HYBRID_TYPES[0]: read_gated_delta(file, by_key_head=False)})
    return with_mixtures(config, read_shared_mixture(file, top_k=8, renormalize=True), all_layers(file))
