"""The names of a layer's tensors in a checkpoint, and what is stored beside the quantized matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.layers.layer_weights import LayerWeights
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from ops.quantize.layer_blocks import blocks, matrix_of

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
"""By their names in `LayerWeights`."""


def other_tensors(weights: LayerWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's norms and biases, which stay as they are, by their names within the layer."""
    mixer, norms = blocks(weights)[0], weights.norms
    assert norms.before_mixer is not None
    assert norms.before_feed_forward is not None
    tensors = {
        "input_layernorm.weight": norms.before_mixer.weight,
        "post_attention_layernorm.weight": norms.before_feed_forward.weight,
    }
    if mixer.head_norm is not None:
        tensors |= {"self_attn.q_norm.weight": mixer.head_norm.query, "self_attn.k_norm.weight": mixer.head_norm.key}
    for name, matrix in MATRICES.items():
        bias = matrix_of(weights, name).bias
        if bias is not None:
            parts = bias.split_with_sizes(matrix.rows(mixer.shape, len(bias)))
            tensors |= {f"{module}.bias": part for module, part in zip(matrix.modules, parts, strict=True)}
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


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
