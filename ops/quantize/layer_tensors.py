"""Which modules of a checkpoint the matrices of a layer are made of, by the layer's description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.layer_traits import AttentionShape, LayerTraits
from gpu_worker.layers.layer_weights import LayerWeights
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.block_traits import TensorNames
from gpu_worker.models.layer_source import qkv_order
from ops.quantize.layer_blocks import matrix_names, matrix_of, mixer_of

if TYPE_CHECKING:
    from ops.quantize.methods import Rounded


Rows = Callable[[AttentionShape, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """A matrix of a layer, and the modules whose rows it is made of."""

    modules: tuple[str, ...]
    rows: Rows

    def split(self, shape: AttentionShape, num_rows: int, matrix: Rounded) -> dict[str, Rounded]:
        """Return each module's own part of a matrix of so many rows."""
        return dict(zip(self.modules, matrix.split(self.rows(shape, num_rows)), strict=True))


def _head_rows(shape: AttentionShape, _num_rows: int) -> Sequence[int]:
    gates = 2 if shape.output_gate else 1
    return [count * shape.head_dim for count in (shape.num_heads * gates, shape.num_kv_heads, shape.num_kv_heads)]


def _halves(_shape: AttentionShape, num_rows: int) -> Sequence[int]:
    return [num_rows // 2] * 2


def _whole(_shape: AttentionShape, num_rows: int) -> Sequence[int]:
    return [num_rows]


def fused_matrix(name: str, traits: LayerTraits, names: TensorNames) -> FusedMatrix:
    """Return which modules a matrix of a layer is made of, by its name in `layer_blocks`."""
    room, _, part = name.rpartition(".")
    if not room:
        return _of_layer(name, traits, names)
    assert isinstance(traits.feed_forward, MixtureShape)
    mixture = traits.feed_forward.names
    if room == "shared":
        module, matrices = mixture.shared, mixture.shared_matrices
    else:
        module, matrices = f"{mixture.experts[0]}.{room.removeprefix('experts.')}", mixture.matrices
    return _fused(module, matrices[:-1] if part == "gate_up" else matrices[-1:], _halves)


def _of_layer(name: str, traits: LayerTraits, names: TensorNames) -> FusedMatrix:
    """Return those of attention, and of a block without experts."""
    if name == "qkv":
        assert isinstance(traits.mixer, AttentionShape)
        parts = names.qkv[:2] + names.qkv[1:2] if traits.mixer.values_are_keys else names.qkv
        return _fused("self_attn", parts, _head_rows)
    if name == "output":
        return _fused("self_attn", (names.output,), _whole)
    return _fused("mlp", names.gate_up if name == "gate_up" else (getattr(names, name),), _halves)


def _fused(module: str, parts: Sequence[str], rows: Rows) -> FusedMatrix:
    return FusedMatrix(tuple(f"{module}.{part}" for part in parts), rows if len(parts) > 1 else _whole)


def row_order(name: str, traits: LayerTraits) -> torch.Tensor | None:
    """Return which row of the checkpoint each row of a matrix is; None where they are in its order."""
    if name != "qkv":
        return None
    assert isinstance(traits.mixer, AttentionShape)
    return qkv_order(traits.mixer)


def scaled_tensors(weights: LayerWeights, traits: LayerTraits, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what a method that scales inputs has changed besides matrices, by names within the layer."""
    mixer, norms, names = mixer_of(weights), weights.norms, TensorNames()
    assert norms.before_mixer is not None
    assert norms.before_feed_forward is not None
    tensors = {
        f"{names.before_mixer}.weight": norms.before_mixer.weight,
        f"{names.before_feed_forward}.weight": norms.before_feed_forward.weight,
    }
    for name in matrix_names(traits.feed_forward):
        bias, matrix = matrix_of(weights, name).bias, fused_matrix(name, traits, names)
        if bias is not None:
            parts = bias.split_with_sizes(matrix.rows(mixer.shape, len(bias)))
            tensors |= {f"{module}.bias": part for module, part in zip(matrix.modules, parts, strict=True)}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
