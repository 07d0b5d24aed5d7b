"""What the layers of a model keep, from its configuration."""

from __future__ import annotations

import torch

from gpu_worker.layers.cache_layout import (
    CacheLayout,
    KeepsBoth,
    KeepsState,
    KeepsTokens,
    LayerMemory,
    ReadsLayer,
    StatePart,
)
from gpu_worker.layers.layer_traits import (
    AttentionBesideMamba2Shape,
    AttentionShape,
    GatedDeltaShape,
    LatentShape,
    Mamba2Shape,
    ShortConvShape,
)
from gpu_worker.models.config import ModelConfig
from kernels.layer_cache import CacheShape


def cache_layout(config: ModelConfig) -> CacheLayout:
    """Describe what each layer keeps: nothing in a model that attends in both directions."""
    if config.is_bidirectional:
        return CacheLayout((None,) * config.num_layers)
    return CacheLayout(tuple(_layer_memory(config, layer) for layer in range(config.num_layers)))


def _layer_memory(config: ModelConfig, layer: int) -> LayerMemory:
    mixer = config.layer(layer).mixer
    if isinstance(mixer, ShortConvShape):
        inputs = StatePart((mixer.conv_width - 1, mixer.num_channels), torch.float32)
        return KeepsState((inputs,), mixer.num_channels)
    if isinstance(mixer, GatedDeltaShape | Mamba2Shape):
        return _matrix_memory(mixer)
    if isinstance(mixer, AttentionBesideMamba2Shape):
        return KeepsBoth(_attention_memory(mixer.attention), _matrix_memory(mixer.mamba2))
    if isinstance(mixer, LatentShape):
        return KeepsTokens(CacheShape(1, mixer.key_dim, mixer.latent_dim, is_latent=True))
    if mixer is None:
        return None
    return _attention_memory(mixer) if mixer.reads_layer is None else ReadsLayer(mixer.reads_layer)


def _attention_memory(shape: AttentionShape) -> KeepsTokens:
    windows = [window for window in (shape.sliding_window, shape.chunk_size) if window is not None]
    return KeepsTokens(CacheShape(shape.num_kv_heads, shape.head_dim, shape.value_size), min(windows, default=None))


def _matrix_memory(shape: GatedDeltaShape | Mamba2Shape) -> KeepsState:
    """The last inputs of the convolution, and a matrix a head; of drafts what the projections yield of them."""
    sizes = shape.sizes
    inputs = StatePart((shape.conv_width - 1, sizes.num_features), torch.float32)
    return KeepsState((inputs, StatePart(sizes.state_shape, torch.float32)), sizes.num_features + sizes.num_gates)
