"""Granite-MoE with an expert that all tokens get."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.granite_moe import read_granite_moe
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GraniteMoeSharedForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_granite_moe(file, ARCHITECTURE, file.integer("shared_intermediate_size", 1024, minimum=0))
