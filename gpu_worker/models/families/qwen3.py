"""Qwen3 (dense): normalised query and key heads, and an optional sliding window in some layers.

Qwen3-VL is served without its vision tower.
"""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.layers.layer_traits import AttentionShape, HeadNorm
from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows
from gpu_worker.models.text_part import text_names, text_part

ARCHITECTURE = "Qwen3ForCausalLM"
ALSO = ("Qwen3VLForConditionalGeneration",)

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128000,
        "rope_theta": 5e5,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file, _TEXT)
    attention_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=attention_bias, output_bias=attention_bias, head_norm=HeadNorm.HEADS),
        layer_windows=read_optional_windows(file),
        block=BlockTraits(names=text_names(TensorNames())),
    )
    return read_decoder(file, traits)
