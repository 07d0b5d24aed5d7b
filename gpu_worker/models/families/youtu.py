"""Youtu-LLM: DeepSeek V3's latent attention in a dense decoder."""

from __future__ import annotations

from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.latent_config import read_latent_decoder

ARCHITECTURE = "YoutuForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(ARCHITECTURE, is_tied=True)
    return read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
