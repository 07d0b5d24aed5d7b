"""The names of a layer's tensors in a checkpoint, and what is stored beside the quantized matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.layer_traits import AttentionShape, FeedForwardShape
from gpu_worker.layers.layer_weights import LayerWeights, MixtureWeights
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from ops.quantize.layer_blocks import matrix_names, matrix_of, mixer_of, mixture_of

if TYPE_CHECKING:
    from ops.quantize.methods import Rounded


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """One of the four matrices of `LayerWeights`, and the modules whose rows it is made of."""

    modules: tuple[str, ...]
    rows: Callable[[AttentionShape, int], Sequence[int]]

    def split(self, shape: AttentionShape, num_rows: int, matrix: Rounded) -> dict[str, Rounded]:
        """Return each module's own part of a matrix of so many rows."""
        return dict(zip(self.modules, matrix.split(self.rows(shape, num_rows)), strict=True))


def _head_rows(shape: AttentionShape, _num_rows: int) -> Sequence[int]:
    return [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]


def _halves(_shape: AttentionShape, num_rows: int) -> Sequence[int]:
    return [num_rows // 2] * 2


def _whole(_shape: AttentionShape, num_rows: int) -> Sequence[int]:
    return [num_rows]


MATRICES: Mapping[str, FusedMatrix] = MappingProxyType(
    {
        "qkv": FusedMatrix(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _head_rows),
        "output": FusedMatrix(("self_attn.o_proj",), _whole),
        "gate_up": FusedMatrix(("mlp.gate_proj", "mlp.up_proj"), _halves),
        "down": FusedMatrix(("mlp.down_proj",), _whole),
    }
)
"""Of a layer without experts, by their names in `layer_blocks`."""


def fused_matrix(name: str, feed_forward: FeedForwardShape | None) -> FusedMatrix:
    """Return which modules a matrix of a layer is made of, by its name in `layer_blocks`."""
    room, _, part = name.rpartition(".")
    if not room:
        return MATRICES[name]
    assert isinstance(feed_forward, MixtureShape)
    names = feed_forward.names
    if room == "shared":
        module, matrices = names.shared, names.shared_matrices
    else:
        module, matrices = f"{names.experts[0]}.{room.removeprefix('experts.')}", names.matrices
    modules = tuple(f"{module}.{matrix}" for matrix in (matrices[:-1] if part == "gate_up" else matrices[-1:]))
    return FusedMatrix(modules, _halves if len(modules) == 2 else _whole)


def other_tensors(
    weights: LayerWeights, feed_forward: FeedForwardShape | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a layer's norms, biases and routers, which stay as they are, by their names within the layer."""
    mixer, norms = mixer_of(weights), weights.norms
    assert norms.before_mixer is not None
    assert norms.before_feed_forward is not None
    tensors = {
        "input_layernorm.weight": norms.before_mixer.weight,
        "post_attention_layernorm.weight": norms.before_feed_forward.weight,
    }
    if mixer.head_norm is not None:
        tensors |= {"self_attn.q_norm.weight": mixer.head_norm.query, "self_attn.k_norm.weight": mixer.head_norm.key}
    if isinstance(feed_forward, MixtureShape):
        tensors |= _router_tensors(mixture_of(weights), feed_forward)
    for name in matrix_names(feed_forward):
        bias, matrix = matrix_of(weights, name).bias, fused_matrix(name, feed_forward)
        if bias is not None:
            parts = bias.split_with_sizes(matrix.rows(mixer.shape, len(bias)))
            tensors |= {f"{module}.bias": part for module, part in zip(matrix.modules, parts, strict=True)}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _router_tensors(mixture: MixtureWeights, shape: MixtureShape) -> dict[str, torch.Tensor]:
    router = shape.names.router[0]
    tensors = {f"{router}.weight": mixture.router.weight.dequantize()}
    if mixture.router.bias is not None:
        tensors[f"{router}.bias"] = mixture.router.bias
    if mixture.shared is not None and mixture.shared.gate is not None:
        tensors[f"{shape.names.shared_gate}.weight"] = mixture.shared.gate.weight.dequantize()
    return tensors


def dense_tensors(config: ModelConfig, checkpoint: Checkpoint, *, has_head: bool) -> dict[str, torch.Tensor]:
    """Return what is outside the layers, by its name in the checkpoint; of heads, those that are not rounded."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tensors = {
        "model.embed_tokens.weight": checkpoint.take("model.embed_tokens.weight", *vocabulary),
        "model.norm.weight": checkpoint.take("model.norm.weight", config.hidden_size),
    }
    if not (has_head or config.tie_word_embeddings):
        tensors["lm_head.weight"] = checkpoint.take("lm_head.weight", *vocabulary)
    return tensors
