"""The matrices of a layer that are quantized, by name, and the modules that stay beside them in their own numbers.

Of attention they are `qkv` and `output`; by latent vectors `query_down`, `query`, `latent` and `output`; of a recurrent
layer `inputs` and `output`. A layer that attends and has a state has `attention.qkv`, `mamba2.inputs` and so on. Of a
dense block they are `gate_up` and `down`, or `up` where there is no gate. A mixture has `experts.3.gate_up`,
`experts.3.down` and so on in place of these or beside them, and those of the expert that all tokens get,
`shared.gate_up` and `shared.down`.

What stays: routers, whose choices are all or nothing; what makes keys and values of latent vectors, which is read as
plain numbers; the gates of recurrent layers, whose errors a state adds up; the small matrices of what layers are given
of each token; and parts that are not matrices, such as normalisations, convolutions and decays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_worker.layers.cache_layout import KeepsBoth, KeepsState
from gpu_worker.layers.dense_and_mixture import DenseAndMixtureWeights
from gpu_worker.layers.layer import LayerTraits, LayerWeights
from gpu_worker.layers.linear import LinearShape, Partition, Projection
from gpu_worker.layers.mixture import MixtureShape, MixtureWeights
from gpu_worker.layers.mlp import GatedWeights, PlainWeights
from gpu_worker.models.config import ModelConfig
from kernels.moe import ExpertWeights

_GATED = ("gate_up", "down")
# Linear layers of what layers are given of each token: one outside of the layers, and two in each.
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")
_OF_FEED_FORWARD = (*_GATED, "up")
_ROUTERS = ("router", "shared.gate")
_SHARED, _EXPERT = "shared", "experts."


def matrices(layer: LayerTraits, config: ModelConfig) -> dict[str, LinearShape]:
    """Return a layer's matrices by name, with the modules of a checkpoint that each is made of."""
    size = config.hidden_size
    rounded = {name: each for name, each in layer.linears(config.block.names, size).items() if each.is_rounded}
    shared = {name: each for name, each in rounded.items() if name.startswith(f"{_SHARED}.")}
    own = {name: each for name, each in rounded.items() if name not in shared}
    return {**own, **(_experts(layer.mixture, size) if layer.mixture is not None else {}), **shared}


def _experts(mixture: MixtureShape, hidden_size: int) -> dict[str, LinearShape]:
    names, inner, outer = mixture.names, mixture.expert_size, mixture.latent_size or hidden_size
    *first, last = names.matrices
    rows = (inner * mixture.activation.num_projections // len(first),) * len(first)
    found: dict[str, LinearShape] = {}
    for expert in range(mixture.num_experts):
        room = f"{names.experts[0]}.{expert}"
        modules = tuple(f"{room}.{name}" for name in first)
        gate_up, down = expert_names(expert)
        found[gate_up] = LinearShape(modules, rows, outer, Partition.COLUMN)
        found[down] = LinearShape((f"{room}.{last}",), (outer,), inner, Partition.ROW)
    return found


def kept_modules(config: ModelConfig) -> list[str]:
    """Return the last names of linear layers that stay in their own numbers, and that readers must be told of.

    Routers are not among them: no reader takes them for linear layers.
    """
    names: dict[str, None] = {}
    for layer in config.layers:
        for name, linear in layer.linears(config.block.names, config.hidden_size).items():
            if not linear.is_rounded and name not in _ROUTERS:
                names |= dict.fromkeys(module.rpartition(".")[2] for module in linear.modules)
    return [*names, *(_LAYER_INPUTS if config.block.layer_inputs is not None else ())]


def unrounded_parts(config: ModelConfig) -> list[str]:
    """Return what stays in layers as the checkpoint has it, in words, then the linear layers among it by name."""
    memories = [layer.memory() for layer in config.layers]
    states = [memory.state if isinstance(memory, KeepsBoth) else memory for memory in memories]
    num_tensors = max((len(state.parts) for state in states if isinstance(state, KeepsState)), default=0)
    parts = {
        "normalisations": True,
        "routers": any(layer.mixture is not None for layer in config.layers),
        # Each state begins with the last inputs of a convolution.
        "convolutions": num_tensors > 0,
        "decays and steps of states": num_tensors > 1,
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


def with_matrix(weights: LayerWeights, name: str, projection: Projection) -> LayerWeights:
    """Return a layer with another matrix in place of that of the same name."""
    room, _, part = name.rpartition(".")
    if is_of_expert(name):
        return _with_mixture(weights, _with_expert(mixture_of(weights), room, part, projection))
    change: dict[str, Any] = {part: projection}
    if part not in _OF_FEED_FORWARD:
        mixer: Any = weights.mixer
        if room:
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
