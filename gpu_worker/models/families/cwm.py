"""CWM (Meta's Code World Model): Llama 3 with a window in all layers but every fourth, beginning with the first."""

from __future__ import annotations

from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows

ARCHITECTURE = "CwmForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        mlp_bias=file.boolean("mlp_bias", False),
        layer_windows=read_windows(file, lambda layer: layer % 4 != 0, 8192),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=1e6,
    )
    return read_decoder(file, traits)
