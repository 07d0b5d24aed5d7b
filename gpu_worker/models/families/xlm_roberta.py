"""XLM-RoBERTa, which many multilingual embedding models and rerankers are: RoBERTa in more languages."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.encoder_config import read_encoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "XLMRobertaModel"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_encoder(file, ARCHITECTURE, skips_padding=True)
