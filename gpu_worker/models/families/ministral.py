"""Ministral (2024, 8B): Mistral with a window in some layers."""

from __future__ import annotations

from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows

ARCHITECTURE = "MinistralForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    windows = read_windows(file, lambda _layer: True)
    return read_decoder(file, FamilyTraits(ARCHITECTURE, layer_windows=windows))
