"""Helium: Llama whose neighbouring dimensions turn together."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "HeliumForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(interleaved=True, qkv_bias=file.boolean("attention_bias", False)),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-8),
        rope_theta=100_000.0,
    )
    return read_decoder(file, traits)
