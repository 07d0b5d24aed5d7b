"""Jais 2: LayerNorm, squared ReLU without a gate, and biases throughout."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "Jais2ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", True)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", True),
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True)),
        activation=read_activation(file, default="relu2"),
        norm_eps=("layer_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)
