"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "SeedOssForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    attention = AttentionShape(
        qkv_bias=file.boolean("attention_bias", True), output_bias=file.boolean("attention_out_bias", False)
    )
    mlp_bias = file.boolean("mlp_bias", False)
    return read_decoder(file, FamilyTraits(ARCHITECTURE, head_dim=128, attention=attention, mlp_bias=mlp_bias))
