"""Command R (Cohere): blocks side by side, LayerNorm without bias, neighbouring dimensions turn together."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.models.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "CohereForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    if file.boolean("use_qk_norm", False):
        raise file.error("use_qk_norm", "is true; supported: Cohere's models without it, as Command R and Command R7B")
    return read_decoder(file, cohere_traits(file, ARCHITECTURE))


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
