"""Command R (Cohere): blocks side by side, LayerNorm without bias, neighbouring dimensions turn together.

Command R+ normalises each head of queries and keys besides.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "CohereForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = replace(cohere_traits(file, ARCHITECTURE), rope_theta=500_000.0)
    if traits.attention is not None and file.boolean("use_qk_norm", False):
        traits = replace(traits, attention=replace(traits.attention, head_norm=HeadNorm.APART))
    return read_decoder(file, traits)


def cohere_traits(file: JsonFile, architecture: str) -> FamilyTraits:
    """Return what Cohere's first and second generation have in common."""
    bias = file.boolean("attention_bias", False)
    return FamilyTraits(
        architecture,
        attention=AttentionShape(interleaved=True, qkv_bias=bias, output_bias=bias),
        block=BlockTraits(
            norm=NormKind(is_centered=True),
            names=TensorNames(before_feed_forward=None),
            is_parallel=True,
            logit_scale=file.number("logit_scale", 0.0625),
        ),
        norm_eps=("layer_norm_eps", 1e-5),
        is_tied=True,
    )
