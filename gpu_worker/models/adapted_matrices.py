"""Which matrices adapters can be beside apart from those of a rank's own layers."""

from __future__ import annotations

import torch

from gpu_worker.layers.adapters import HEAD, AdapterTargets, EmbeddingAdapters
from gpu_worker.layers.division import Division
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.ranks import Ranks, is_last, layers_of_stage
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
    config: ModelConfig, adapters: AdapterTargets | None, division: Division | None
) -> AdapterTable | None:
    """Let adapters be beside the head, or a rank's tokens of it, and return their table; None where none can."""
    if adapters is None:
        return None
    own_rows = None if division is None else division.tokens(config.vocab_size)
    return adapters.add((HEAD,), (config.vocab_size,), config.hidden_size, own_rows=own_rows)[0]


def declare_elsewhere(
    config: ModelConfig, source: LayerSource, dtype: torch.dtype, ranks: Ranks, adapters: AdapterTargets | None
) -> None:
    """Let adapters be beside the matrices of other stages: rank 0 reads adapters for all of them."""
    if adapters is None:
        return
    own = layers_of_stage(config.num_layers, ranks.stage, ranks.num_stages)
    for index, layer in enumerate(config.layers):
        if index not in own:
            layer.declare(source, f"model.layers.{index}", adapters)
    if ranks.stage > 0:
        adapters.add_embedding(config.vocab_size, config.hidden_size, source.embedding_scale(dtype), None)
    if not is_last(ranks):
        adapters.add((HEAD,), (config.vocab_size,), config.hidden_size, is_elsewhere=True)
