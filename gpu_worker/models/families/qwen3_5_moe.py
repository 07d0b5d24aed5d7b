"""Qwen3.5-MoE and 3.6 (text part): Qwen3.5 with small experts, and one that all tokens get, in all layers."""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, with_silu_mixtures
from gpu_worker.models.qwen_hybrid import read_hybrid_decoder, read_shared_mixture
from gpu_worker.models.text_part import text_part

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
ALSO = ("Qwen3_5MoeForConditionalGeneration",)

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file, _TEXT)
    config = read_hybrid_decoder(file, ARCHITECTURE, by_key_head=False, inner_size="moe_intermediate_size")
    return with_silu_mixtures(file, config, read_shared_mixture(file, top_k=8, renormalize=True), all_layers(file))
