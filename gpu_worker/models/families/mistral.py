"""Mistral: one sliding window for all layers, or none."""

from __future__ import annotations

from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows

ARCHITECTURE = "MistralForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. An absent window is the first release's 4096; null is none."""
    return read_decoder(file, FamilyTraits(ARCHITECTURE, layer_windows=read_uniform_windows(file, 4096)))
