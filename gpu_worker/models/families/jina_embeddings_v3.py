"""Jina Embeddings v3: XLM-RoBERTa whose tokens turn. Its adapters for tasks are not part of the model."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rotary_encoder import POST_NORM_NAMES, post_norm_block, read_rotary_encoder

ARCHITECTURE = "JinaEmbeddingsV3Model"

_NAMES = replace(POST_NORM_NAMES, up="fc1", down="fc2")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=True, output_bias=True),
        is_gated=False,
        mlp_bias=True,
        block=post_norm_block(_NAMES, file.integer("type_vocab_size", 1)),
        activation=read_activation(file, default="gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        rope_theta=20_000.0,
    )
    return read_rotary_encoder(file, traits)
