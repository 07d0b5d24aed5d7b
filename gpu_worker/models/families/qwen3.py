"""Qwen3 (dense): normalised query and key heads, and an optional sliding window in some layers."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    attention_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=attention_bias, output_bias=attention_bias, head_norm=HeadNorm.HEADS),
        layer_windows=read_optional_windows(file),
    )
    return read_decoder(file, traits)
