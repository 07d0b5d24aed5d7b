"""What the layers of a model keep, from its configuration."""

from __future__ import annotations

from gpu_worker.layers.cache_layout import CacheLayout, KeepsTokens, LayerMemory
from gpu_worker.models.config import ModelConfig
from kernels.layer_cache import CacheShape


def cache_layout(config: ModelConfig) -> CacheLayout:
    """Describe what each layer keeps: nothing in a model that attends in both directions."""
    if config.encoder is not None:
        return CacheLayout((None,) * config.num_layers)
    return CacheLayout(tuple(_layer_memory(config, layer) for layer in range(config.num_layers)))


def _layer_memory(config: ModelConfig, layer: int) -> LayerMemory:
    shape = config.attention_shape(layer)
    return KeepsTokens(CacheShape(shape.num_kv_heads, shape.head_dim, shape.head_dim), shape.sliding_window)
