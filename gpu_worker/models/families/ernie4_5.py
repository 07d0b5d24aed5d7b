"""ERNIE 4.5 (dense): Llama with an interleaved rotation."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "Ernie4_5ForCausalLM"
ALSO = ("Ernie4_5_ForCausalLM",)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, ernie_traits(file, ARCHITECTURE, head_dim=128))


def ernie_traits(file: JsonFile, architecture: str, head_dim: int | None = None) -> FamilyTraits:
    """Return what ERNIE's models have in common."""
    bias = file.boolean("use_bias", False)
    return FamilyTraits(
        architecture,
        head_dim=head_dim,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, interleaved=True),
        mlp_bias=bias,
        norm_eps=("rms_norm_eps", 1e-5),
        is_tied=True,
        rope_theta=500_000.0,
    )
