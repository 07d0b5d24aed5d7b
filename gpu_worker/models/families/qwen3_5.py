"""Qwen3.5 and 3.6 (dense, text part): three gated delta nets to each layer of gated attention with partial rotation.

The models with a vision tower are served without it.
"""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.qwen_hybrid import read_hybrid_decoder
from gpu_worker.models.text_part import text_part

ARCHITECTURE = "Qwen3_5ForCausalLM"
ALSO = ("Qwen3_5ForConditionalGeneration",)

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_hybrid_decoder(text_part(file, _TEXT), ARCHITECTURE, by_key_head=False)
