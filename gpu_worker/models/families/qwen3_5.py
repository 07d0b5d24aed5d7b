"""Qwen3.5 and 3.6 (dense, text part): three gated delta nets to each layer of gated attention with partial rotation."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.qwen_hybrid import read_hybrid_decoder

ARCHITECTURE = "Qwen3_5ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_hybrid_decoder(file, ARCHITECTURE, by_key_head=False)
