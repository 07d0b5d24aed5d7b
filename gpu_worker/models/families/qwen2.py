"""Qwen2 and Qwen2.5: query, key and value biases, and an optional sliding window in some layers."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=True),
        layer_windows=read_optional_windows(file),
    )
    return read_decoder(file, traits)
