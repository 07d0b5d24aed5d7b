"""Whether tokens of a model's sequences may leave the KV cache while later ones stay."""

from __future__ import annotations

from gpu_worker.layers.rope_scaling import RopeType
from gpu_worker.models.config import ModelConfig


def eviction_problem(config: ModelConfig, max_model_len: int) -> str | None:
    """Return what keeps a model from evicting tokens of sequences of up to `max_model_len`; None where nothing does."""
    if config.is_bidirectional:
        return "it attends in both directions"
    layout = config.cache_layout.within(max_model_len)
    if layout.state_layers:
        return "some of its layers are recurrent"
    if len(layout.groups) > 1:
        return "some of its layers have sliding windows"
    if any(layout.shape_of(layer).is_latent for layer in layout.groups[0].layers):
        return "its attention is latent"
    if config.block.positions is not None:
        return "its positions are learned, and not rotations"
    if any(rope.rope_type is RopeType.DYNAMIC for rope in config.ropes):
        return "its rotations depend on the length of a text (dynamic scaling)"
    return None
