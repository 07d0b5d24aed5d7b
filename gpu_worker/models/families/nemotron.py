"""Nemotron and Minitron (dense): LayerNorm stored less one, heads that turn in part, squared ReLU without a gate."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "NemotronForCausalLM"
SAMPLE = {"partial_rotary_factor": 0.5}


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True, is_offset=True)),
        activation=read_activation(file, default="relu2"),
        norm_eps=("norm_eps", 1e-5),
    )
    return read_decoder(file, traits)
