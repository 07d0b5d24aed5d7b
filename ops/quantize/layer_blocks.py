"""The four matrices of a layer that can be quantized: attention, and a gated block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.layers.layer_weights import AttentionWeights, GatedWeights, LayerWeights, Projection


def with_matrices(weights: LayerWeights, matrices: Mapping[str, Projection]) -> LayerWeights:
    """Return a layer with other matrices in place of those of the same names."""
    changes: dict[str, Any] = dict(matrices)
    of_mixer = {name: changes.pop(name) for name in ("qkv", "output") if name in changes}
    mixer, feed_forward = blocks(weights)
    return replace(weights, mixer=replace(mixer, **of_mixer), feed_forward=replace(feed_forward, **changes))


def matrix_of(weights: LayerWeights, name: str) -> Projection:
    """Return a matrix by its name in `MATRICES`."""
    mixer, feed_forward = blocks(weights)
    projection: Projection = getattr(mixer if name in ("qkv", "output") else feed_forward, name)
    return projection


def blocks(weights: LayerWeights) -> tuple[AttentionWeights, GatedWeights]:
    """Return the blocks of a layer that the job has let pass."""
    mixer, feed_forward = weights.mixer, weights.feed_forward
    assert isinstance(mixer, AttentionWeights)
    assert isinstance(feed_forward, GatedWeights)
    return mixer, feed_forward
