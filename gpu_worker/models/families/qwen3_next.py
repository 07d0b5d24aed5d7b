"""Qwen3-Next: gated delta nets, gated attention, and small experts with one that all tokens get."""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import sparse_layers, with_silu_mixtures
from gpu_worker.models.qwen_hybrid import read_hybrid_decoder, read_shared_mixture

ARCHITECTURE = "Qwen3NextForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    config = read_hybrid_decoder(file, ARCHITECTURE, by_key_head=True)
    mixture = read_shared_mixture(file, top_k=10, renormalize=file.boolean("norm_topk_prob", True))
    return with_silu_mixtures(file, config, mixture, sparse_layers(file))
