"""Which modules of a checkpoint the matrices of a layer are made of, and how, by the layer's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.layer_traits import (
    AttentionShape,
    GatedDeltaShape,
    GatedShape,
    LatentShape,
    LayerTraits,
    Mamba2Shape,
    ShortConvShape,
)
from gpu_worker.layers.layer_weights import LayerWeights
from gpu_worker.models.block_traits import TensorNames
from gpu_worker.models.gated_delta_source import input_order
from gpu_worker.models.layer_source import qkv_order, qkv_parts
from gpu_worker.models.mamba2_source import input_widths
from gpu_worker.models.projections import feature_factors
from ops.quantize.layer_blocks import is_of_expert, matrix_names, matrix_of

if TYPE_CHECKING:
    from ops.quantize.methods import Rounded


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """A matrix of a layer, and the modules whose rows it is made of.

    Attributes:
        modules: Their names within the layer.
        rows: Of each; None is as many of each.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...] | None = None

    def split(self, num_rows: int, matrix: Rounded) -> dict[str, Rounded]:
        """Return each module's own part of a matrix of so many rows."""
        return dict(zip(self.modules, matrix.split(self.rows_of(num_rows)), strict=True))

    def rows_of(self, num_rows: int) -> Sequence[int]:
        """Return the rows of each module, of so many in all."""
        return self.rows or [num_rows // len(self.modules)] * len(self.modules)


def fused_matrix(name: str, traits: LayerTraits, names: TensorNames) -> FusedMatrix:
    """Return which modules a matrix of a layer is made of, by its name in `layer_blocks`."""
    room, _, part = name.rpartition(".")
    if is_of_expert(name) or room == "shared":
        assert traits.mixture is not None
        mixture = traits.mixture.names
        if room == "shared":
            module, matrices = mixture.shared, mixture.shared_matrices
        else:
            module, matrices = f"{mixture.experts[0]}.{room.removeprefix('experts.')}", mixture.matrices
        return _fused(module, matrices[:-1] if part == "gate_up" else matrices[-1:])
    if part in ("gate_up", "up", "down"):
        return _fused("mlp", names.gate_up if part == "gate_up" else (getattr(names, part),))
    return _of_mixer(part, mixer_part(name, traits), names)


def mixer_part(name: str, traits: LayerTraits) -> object:
    """Return the mixer that a matrix belongs to: one of two, where a layer has two."""
    room = name.rpartition(".")[0]
    return getattr(traits.mixer, room) if room else traits.mixer


def _of_mixer(part: str, mixer: object, names: TensorNames) -> FusedMatrix:
    if isinstance(mixer, AttentionShape):
        return _of_attention(part, mixer, names)
    if isinstance(mixer, LatentShape):
        query_rows = mixer.num_heads * (mixer.plain_dim + mixer.rotary_dim)
        module, rows = {
            "query_down": ("q_a_proj", mixer.query_rank),
            "query": ("q_proj" if mixer.query_rank is None else "q_b_proj", query_rows),
            "latent": ("kv_a_proj_with_mqa", mixer.key_dim),
            "output": ("o_proj", None),
        }[part]
        return _fused("self_attn", (module,), None if rows is None else (rows,))
    if isinstance(mixer, GatedDeltaShape):
        values = mixer.sizes.num_value_heads * mixer.sizes.value_dim
        if part == "output":
            return _fused("linear_attn", ("out_proj",))
        if mixer.by_key_head:
            return _fused("linear_attn", ("in_proj_qkvz",), (mixer.sizes.num_features + values,))
        return _fused("linear_attn", ("in_proj_qkv", "in_proj_z"), (mixer.sizes.num_features, values))
    if isinstance(mixer, Mamba2Shape):
        return _fused("mamba", ("out_proj",)) if part == "output" else _fused("mamba", ("in_proj",), _mamba_rows(mixer))
    assert isinstance(mixer, ShortConvShape)
    return _fused("conv", ("out_proj" if part == "output" else "in_proj",))


def _of_attention(part: str, shape: AttentionShape, names: TensorNames) -> FusedMatrix:
    if part == "output":
        return _fused("self_attn", (names.output,))
    parts, rows = qkv_parts(shape, names)
    return _fused("self_attn", parts, tuple(rows))


def _mamba_rows(shape: Mamba2Shape) -> tuple[int, ...]:
    return (sum(input_widths(shape)),)


def _fused(module: str, parts: Sequence[str], rows: tuple[int, ...] | None = None) -> FusedMatrix:
    return FusedMatrix(tuple(f"{module}.{part}" for part in parts), rows)


def row_order(name: str, traits: LayerTraits) -> torch.Tensor | None:
    """Return which row of the checkpoint each row of a matrix is; None where they are in its order."""
    part, mixer = name.rpartition(".")[2], traits.mixer
    if part == "qkv":
        attention = mixer_part(name, traits)
        assert isinstance(attention, AttentionShape)
        return qkv_order(attention)
    if part == "inputs" and isinstance(mixer, GatedDeltaShape) and mixer.by_key_head:
        return input_order(mixer)
    return None


def row_factors(name: str, traits: LayerTraits, num_rows: int) -> torch.Tensor | None:
    """Return what the checkpoint's rows, in its order, were multiplied by when they were taken; None is nothing.

    Shapes:
        result: `[num_rows]` float32
    """
    part, block = name.rpartition(".")[2], traits.dense
    scales: list[tuple[int, float]] = []
    if is_of_expert(name) or name.startswith("shared."):
        return None
    if part == "gate_up" and isinstance(block, GatedShape):
        scales = [(block.inner_size, block.gate_scale), (block.inner_size, 1.0)]
    elif part == "down" and isinstance(block, GatedShape):
        scales = [(num_rows, block.down_scale)]
    elif part in ("inputs", "output"):
        mixer = mixer_part(name, traits)
        if part == "output" and isinstance(mixer, AttentionShape | Mamba2Shape):
            scales = [(num_rows, mixer.output_scale)]
        elif isinstance(mixer, Mamba2Shape):
            scales = list(zip(input_widths(mixer), mixer.input_scales, strict=True))
    return feature_factors(scales)


def scaled_tensors(weights: LayerWeights, traits: LayerTraits, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what a method that scales inputs has changed besides matrices, by names within the layer."""
    norms, names = weights.norms, TensorNames()
    assert norms.before_mixer is not None
    assert norms.before_feed_forward is not None
    tensors = {
        f"{names.before_mixer}.weight": norms.before_mixer.weight,
        f"{names.before_feed_forward}.weight": norms.before_feed_forward.weight,
    }
    for name in matrix_names(traits):
        bias, matrix = matrix_of(weights, name).bias, fused_matrix(name, traits, names)
        if bias is not None:
            parts = bias.split_with_sizes(list(matrix.rows_of(len(bias))))
            tensors |= {f"{module}.bias": part for module, part in zip(matrix.modules, parts, strict=True)}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
