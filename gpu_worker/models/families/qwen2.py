"""Qwen2 and Qwen2.5: query, key and value biases, and an optional sliding window in some layers.

Qwen2-VL and Qwen2.5-VL are served without their vision towers.
"""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows
from gpu_worker.models.text_part import text_names, text_part

ARCHITECTURE = "Qwen2ForCausalLM"
ALSO = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")

# What a text part means that does not say it.
_TEXT = MappingProxyType(
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file, _TEXT)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=True),
        layer_windows=read_optional_windows(file),
        block=BlockTraits(names=text_names(TensorNames())),
    )
    return read_decoder(file, traits)
