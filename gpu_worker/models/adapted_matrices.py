"""Which matrices adapters can be beside apart from those of the layers that are here."""

from __future__ import annotations

import torch

from gpu_worker.layers.adapters import HEAD, AdapterTargets, EmbeddingAdapters
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.vocabulary import Embedding
from gpu_worker.models.config import ModelConfig
from kernels.low_rank import AdapterTable


def embedding_adapters(
    config: ModelConfig, embedding: object, adapters: AdapterTargets | None
) -> EmbeddingAdapters | None:
    """Let adapters change the embeddings of tokens that are looked up here, and return them; None where none can."""
    if adapters is None or not isinstance(embedding, Embedding):
        return None
    lookups = EmbeddingAdapters(adapters.num_slots, embedding.weight.device)
    adapters.add_embedding(config.vocab_size, config.hidden_size, embedding.scale, lookups)
    return lookups


def head_adapters(
    config: ModelConfig, adapters: AdapterTargets | None, tokens: torch.Tensor | None
) -> AdapterTable | None:
    """Let adapters be beside the head, or these tokens of it, and return their table; None where none can."""
    if adapters is None:
        return None
    return adapters.add((HEAD,), (config.vocab_size,), config.hidden_size, own_rows=tokens)[0]


def declare_elsewhere(
    config: ModelConfig, source: LayerSource, dtype: torch.dtype, here: range, adapters: AdapterTargets | None
) -> None:
    """Let adapters be beside the matrices of other layers, the embedding and the head, where these are not here."""
    if adapters is None:
        return
    for index, layer in enumerate(config.layers):
        if index not in here:
            layer.declare(source, f"model.layers.{index}", adapters)
    if here.start > 0:
        adapters.add_embedding(config.vocab_size, config.hidden_size, source.embedding_scale(dtype), None)
    if here.stop < config.num_layers:
        adapters.add((HEAD,), (config.vocab_size,), config.hidden_size, is_elsewhere=True)
