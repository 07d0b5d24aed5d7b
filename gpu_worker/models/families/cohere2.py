"""Command R7B and Command A (Cohere 2): three layers of four have a window and rotate, the others do neither."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig, map_attention, read_decoder
from gpu_worker.models.families.cohere import cohere_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows

ARCHITECTURE = "Cohere2ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    windows = read_windows(file, all_but_every(file.integer("sliding_window_pattern", 4)))
    config = read_decoder(file, replace(cohere_traits(file, ARCHITECTURE), layer_windows=windows))
    return map_attention(config, lambda shape: replace(shape, rotary=None if shape.sliding_window is None else 0))
