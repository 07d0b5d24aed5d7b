"""The matrices of a layer that can be quantized, by name: those of attention, and of a gated block or all experts.

Of a dense layer they are `qkv`, `output`, `gate_up` and `down`, or `up` where there is no gate. A mixture has
`experts.3.gate_up`, `experts.3.down` and so on in place of the last two, and those of the expert that all tokens get,
`shared.gate_up` and `shared.down`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.layers.layer_traits import FeedForwardShape, PlainShape
from gpu_worker.layers.layer_weights import (
    AttentionWeights,
    GatedWeights,
    LayerWeights,
    MixtureWeights,
    PlainWeights,
    Projection,
)
from gpu_worker.layers.mixture_shape import MixtureShape
from kernels.moe import ExpertWeights

_OF_MIXER = ("qkv", "output")
_OF_BLOCK = ("gate_up", "down")


def matrix_names(feed_forward: FeedForwardShape | None) -> tuple[str, ...]:
    """Return the names of a layer's matrices, by what its feed-forward block is."""
    if isinstance(feed_forward, PlainShape):
        return (*_OF_MIXER, "up", "down")
    if not isinstance(feed_forward, MixtureShape):
        return _OF_MIXER + _OF_BLOCK
    rooms = [f"experts.{expert}" for expert in range(feed_forward.num_experts)]
    rooms += ["shared"] if feed_forward.shared_size else []
    return _OF_MIXER + tuple(f"{room}.{part}" for room in rooms for part in _OF_BLOCK)


def expert_names(expert: int) -> tuple[str, ...]:
    """Return the names of an expert's two matrices."""
    return tuple(f"experts.{expert}.{part}" for part in _OF_BLOCK)


def matrix_of(weights: LayerWeights, name: str) -> Projection:
    """Return a matrix by its name."""
    room, _, part = name.rpartition(".")
    projection: Projection
    if not room:
        projection = getattr(mixer_of(weights) if name in _OF_MIXER else weights.feed_forward, name)
    elif room == "shared":
        projection = getattr(mixture_of(weights).shared, part)
    else:
        experts: ExpertWeights = getattr(mixture_of(weights), part)
        expert = int(room.removeprefix("experts."))
        projection = Projection(experts.forms[expert], experts.bias_of(expert))
    return projection


def with_matrices(weights: LayerWeights, matrices: Mapping[str, Projection]) -> LayerWeights:
    """Return a layer with other matrices in place of those of the same names."""
    for name, projection in matrices.items():
        weights = _with_matrix(weights, name, projection)
    return weights


def _with_matrix(weights: LayerWeights, name: str, projection: Projection) -> LayerWeights:
    room, _, part = name.rpartition(".")
    change: dict[str, Any] = {part: projection}
    if not room and name in _OF_MIXER:
        return replace(weights, mixer=replace(mixer_of(weights), **change))
    if not room:
        assert isinstance(weights.feed_forward, GatedWeights | PlainWeights)
        return replace(weights, feed_forward=replace(weights.feed_forward, **change))
    mixture = mixture_of(weights)
    if room == "shared":
        assert mixture.shared is not None
        return replace(weights, feed_forward=replace(mixture, shared=replace(mixture.shared, **change)))
    experts: ExpertWeights = getattr(mixture, part)
    forms = list(experts.forms)
    forms[int(room.removeprefix("experts."))] = projection.weight
    change = {part: replace(experts, forms=tuple(forms))}
    return replace(weights, feed_forward=replace(mixture, **change))


def mixer_of(weights: LayerWeights) -> AttentionWeights:
    """Return the attention of a layer that the job has let pass."""
    assert isinstance(weights.mixer, AttentionWeights)
    return weights.mixer


def mixture_of(weights: LayerWeights) -> MixtureWeights:
    """Return the mixture of a layer that has one."""
    assert isinstance(weights.feed_forward, MixtureWeights)
    return weights.feed_forward


def blocks(weights: LayerWeights) -> tuple[AttentionWeights, GatedWeights]:
    """Return the blocks of a layer that the job has let pass and that has no experts."""
    assert isinstance(weights.feed_forward, GatedWeights)
    return mixer_of(weights), weights.feed_forward
