"""The matrices of a layer that are quantized, by name, and the modules that stay beside them in their own numbers.

Of attention they are `qkv` and `output`; by latent vectors `query_down`, `query`, `latent` and `output`; of a recurrent
layer `inputs` and `output`. A layer that attends and has a state has `attention.qkv`, `mamba2.inputs` and so on. Of a
dense block they are `gate_up` and `down`, or `up` where there is no gate. A mixture has `experts.3.gate_up`,
`experts.3.down` and so on in place of these or beside them, and those of the expert that all tokens get,
`shared.gate_up` and `shared.down`.

What stays: routers, whose choices are all or nothing; what makes keys and values of latent vectors, which is read as
plain numbers; the gates of recurrent layers, whose errors a state adds up; the small matrices of what layers are given
of each token; and what is no matrix, such as normalisations, convolutions and decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.layers.layer_traits import (
    AttentionBesideMamba2Shape,
    AttentionShape,
    GatedDeltaShape,
    LatentShape,
    LayerTraits,
    Mamba2Shape,
    MixerShape,
    PlainShape,
    ShortConvShape,
)
from gpu_worker.layers.layer_weights import (
    AttentionBesideMamba2Weights,
    AttentionWeights,
    DenseAndMixtureWeights,
    GatedWeights,
    LayerWeights,
    MixtureWeights,
    PlainWeights,
    Projection,
)
from gpu_worker.models.config import ModelConfig
from kernels.moe import ExpertWeights

_GATED = ("gate_up", "down")
# Linear layers of what layers are given of each token: one outside of the layers, and two in each.
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")
_OF_FEED_FORWARD = (*_GATED, "up")
_SHARED, _EXPERT = "shared", "experts."


def matrix_names(layer: LayerTraits) -> tuple[str, ...]:
    """Return the names of a layer's matrices, by what it consists of."""
    names = list(_names_of_mixer(layer.mixer))
    if layer.dense is not None:
        names += ("up", "down") if isinstance(layer.dense, PlainShape) else _GATED
    if (mixture := layer.mixture) is not None:
        rooms = [f"{_EXPERT}{expert}" for expert in range(mixture.num_experts)]
        rooms += [_SHARED] if mixture.shared_size else []
        names += [f"{room}.{part}" for room in rooms for part in _GATED]
    return tuple(names)


def _names_of_mixer(mixer: MixerShape | None) -> tuple[str, ...]:
    if mixer is None:
        return ()
    if isinstance(mixer, AttentionShape):
        return ("qkv", "output")
    if isinstance(mixer, LatentShape):
        return (*(() if mixer.query_rank is None else ("query_down",)), "query", "latent", "output")
    if isinstance(mixer, AttentionBesideMamba2Shape):
        return ("attention.qkv", "attention.output", "mamba2.inputs", "mamba2.output")
    return ("inputs", "output")


def kept_modules(config: ModelConfig) -> list[str]:
    """Return the last names of linear layers that stay in their own numbers, and that readers must be told of.

    Routers are not among them: no reader takes them for linear layers.
    """
    names: dict[str, None] = {}
    for layer in config.layers:
        if isinstance(layer.mixer, LatentShape):
            names["kv_b_proj"] = None
        if isinstance(layer.mixer, GatedDeltaShape):
            names |= dict.fromkeys(("in_proj_ba",) if layer.mixer.by_key_head else ("in_proj_b", "in_proj_a"))
        if (mixture := layer.mixture) is not None and mixture.latent_size:
            names |= dict.fromkeys(name.rpartition(".")[2] for name in mixture.names.latent)
    return [*names, *(_LAYER_INPUTS if config.block.layer_inputs is not None else ())]


def unrounded_parts(config: ModelConfig) -> list[str]:
    """Return what stays in layers as the checkpoint has it, in words, then the linear layers among it by name."""
    mixers = [layer.mixer for layer in config.layers]
    mixers += [mixer.mamba2 for mixer in mixers if isinstance(mixer, AttentionBesideMamba2Shape)]
    has_mixtures = any(layer.mixture is not None for layer in config.layers)
    has_decays = any(isinstance(mixer, GatedDeltaShape | Mamba2Shape) for mixer in mixers)
    has_convolutions = has_decays or any(isinstance(mixer, ShortConvShape) for mixer in mixers)
    parts = {
        "normalisations": True,
        "routers": has_mixtures,
        "convolutions": has_convolutions,
        "decays and steps of states": has_decays,
    }
    return [*(part for part, is_there in parts.items() if is_there), *kept_modules(config)]


def expert_names(expert: int) -> tuple[str, ...]:
    """Return the names of an expert's two matrices."""
    return tuple(f"{_EXPERT}{expert}.{part}" for part in _GATED)


def is_of_expert(name: str) -> bool:
    """Whether a matrix is one expert's."""
    return name.startswith(_EXPERT)


def matrix_of(weights: LayerWeights, name: str) -> Projection:
    """Return a matrix by its name."""
    room, _, part = name.rpartition(".")
    if is_of_expert(name):
        experts: ExpertWeights = getattr(mixture_of(weights), part)
        expert = int(room.removeprefix(_EXPERT))
        return Projection(experts.forms[expert], experts.bias_of(expert))
    holder: Any = weights.mixer
    if part in _OF_FEED_FORWARD:
        holder = mixture_of(weights) if room else _dense_of(weights)
    if room:
        holder = getattr(holder, room)
    projection: Projection = getattr(holder, part)
    return projection


def with_matrices(weights: LayerWeights, matrices: Mapping[str, Projection]) -> LayerWeights:
    """Return a layer with other matrices in place of those of the same names."""
    for name, projection in matrices.items():
        weights = _with_matrix(weights, name, projection)
    return weights


def _with_matrix(weights: LayerWeights, name: str, projection: Projection) -> LayerWeights:
    room, _, part = name.rpartition(".")
    if is_of_expert(name):
        return _with_mixture(weights, _with_expert(mixture_of(weights), room, part, projection))
    change: dict[str, Any] = {part: projection}
    if part not in _OF_FEED_FORWARD:
        mixer = weights.mixer
        assert mixer is not None
        if not room:
            return replace(weights, mixer=replace(mixer, **change))
        assert isinstance(mixer, AttentionBesideMamba2Weights)
        change = {room: replace(getattr(mixer, room), **change)}
        return replace(weights, mixer=replace(mixer, **change))
    if room == _SHARED:
        mixture = mixture_of(weights)
        assert mixture.shared is not None
        return _with_mixture(weights, replace(mixture, shared=replace(mixture.shared, **change)))
    block = weights.feed_forward
    if isinstance(block, DenseAndMixtureWeights):
        return replace(weights, feed_forward=replace(block, dense=replace(block.dense, **change)))
    return replace(weights, feed_forward=replace(_dense_of(weights), **change))


def _with_mixture(weights: LayerWeights, mixture: MixtureWeights) -> LayerWeights:
    """Return a layer with another mixture in place of its own, which may stand beside a dense block."""
    block = weights.feed_forward
    if isinstance(block, DenseAndMixtureWeights):
        return replace(weights, feed_forward=replace(block, mixture=mixture))
    return replace(weights, feed_forward=mixture)


def _with_expert(mixture: MixtureWeights, room: str, part: str, projection: Projection) -> MixtureWeights:
    experts: ExpertWeights = getattr(mixture, part)
    forms = list(experts.forms)
    forms[int(room.removeprefix(_EXPERT))] = projection.weight
    change: dict[str, Any] = {part: replace(experts, forms=tuple(forms))}
    return replace(mixture, **change)


def mixture_of(weights: LayerWeights) -> MixtureWeights:
    """Return the mixture of a layer that has one, alone or beside a dense block."""
    block = weights.feed_forward
    block = block.mixture if isinstance(block, DenseAndMixtureWeights) else block
    assert isinstance(block, MixtureWeights)
    return block


def _dense_of(weights: LayerWeights) -> GatedWeights | PlainWeights:
    """Return the block that all tokens get of a layer that has one, alone or beside experts."""
    block = weights.feed_forward
    block = block.dense if isinstance(block, DenseAndMixtureWeights) else block
    assert isinstance(block, GatedWeights | PlainWeights)
    return block


def blocks(weights: LayerWeights) -> tuple[AttentionWeights, GatedWeights]:
    """Return the blocks of a layer like Llama's."""
    assert isinstance(weights.mixer, AttentionWeights)
    assert isinstance(weights.feed_forward, GatedWeights)
    return weights.mixer, weights.feed_forward
