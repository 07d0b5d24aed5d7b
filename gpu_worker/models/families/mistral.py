"""Mistral: one sliding window for all layers, or none."""

from __future__ import annotations

from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "MistralForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. An absent window is the first release's 4096; null is none."""
    windows = None
    if not file.is_null("sliding_window"):
        windows = (file.integer("sliding_window", 4096),) * file.integer("num_hidden_layers", maximum=1024)
    return read_decoder(file, FamilyTraits(ARCHITECTURE, layer_windows=windows))
