"""Granite-MoE with the windows, sinks and rotations of its dense sister."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.granite_moe import read_granite_moe
from gpu_worker.models.families.granite_swa import with_windows
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GraniteMoeSWAForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    shared_size = file.integer("shared_intermediate_size", 0, minimum=0)
    return with_windows(file, read_granite_moe(file, ARCHITECTURE, shared_size))
