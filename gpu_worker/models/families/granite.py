"""Granite (dense): Llama with factors on embeddings, attention scores, blocks and logits."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GraniteForCausalLM"
SAMPLE = {"attention_multiplier": 0.1, "residual_multiplier": 0.2, "embedding_multiplier": 12.0, "logits_scaling": 8.0}


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, granite_traits(file, ARCHITECTURE))


def granite_traits(file: JsonFile, architecture: str) -> FamilyTraits:
    """Return what all Granite models have in common."""
    bias = file.boolean("attention_bias", False)
    return FamilyTraits(
        architecture,
        attention=AttentionShape(scale=file.number("attention_multiplier", 1.0), qkv_bias=bias, output_bias=bias),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(
            embedding_scale=file.number("embedding_multiplier", 1.0),
            residual_scale=file.number("residual_multiplier", 1.0),
            logit_scale=1 / file.number("logits_scaling", 1.0),
        ),
    )
