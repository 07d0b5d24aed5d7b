"""What GGUF metadata say about GPT-2, whose converter turns matrices round."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import gpt2
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, TranslatedFamily
from gpu_worker.models.gguf_layers import num_layers, read_eps
from gpu_worker.quantization.gguf.file import GGUFFile


def _fields(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "n_embd": metadata.integer(f"{prefix}.embedding_length"),
        "n_head": metadata.integer(f"{prefix}.attention.head_count", maximum=MAX_HEADS),
        "n_layer": num_layers(file, prefix),
        "n_positions": metadata.integer(f"{prefix}.context_length"),
        "n_inner": metadata.integer(f"{prefix}.feed_forward_length"),
        "layer_norm_epsilon": read_eps(file, prefix),
    }


def _finish(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    names = replace(config.block.names, is_transposed=False)
    return replace(config, block=replace(config.block, names=names))


GPT2 = TranslatedFamily(gpt2.read_config, _fields, _finish)
"""Files of this architecture."""
