"""GLM-4.7-Flash: DeepSeek V3's form."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.deepseek_v3 import read_latent_mixtures
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "Glm4MoeLiteForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_latent_mixtures(file, ARCHITECTURE)
