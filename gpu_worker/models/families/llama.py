"""Llama 2 and 3, and the many models that share their form."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "LlamaForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration: the plain decoder, every bias optional."""
    attention_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=attention_bias, output_bias=attention_bias),
        mlp_bias=file.boolean("mlp_bias", False),
    )
    return read_decoder(file, traits)
