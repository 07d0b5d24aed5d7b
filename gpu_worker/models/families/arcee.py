"""Arcee (AFM): Llama whose feed-forward blocks have squared ReLU and no gate."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "ArceeForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", False),
        activation=read_activation(file, default="relu2"),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)
