"""The memory that a decode step must read: by the bandwidth it takes, the fastest possible step."""

from __future__ import annotations

import math

import torch

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.dense_and_mixture import DenseAndMixtureShape
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.layer import FeedForwardShape, MixerShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.models.config import ModelConfig

_STATE_BYTES = torch.float32.itemsize


def bytes_per_decode_step(
    model: ModelConfig,
    dtype: torch.dtype,
    batch: int,
    context: int,
    weight_dtype: torch.dtype | None = None,
) -> int | None:
    """Return what a decode step reads at least: every multiplied weight, the KV of its sequences, their states.

    None where weights are stored in codes, whose bytes the sizes do not tell, and where a layer neither attends with
    keys and values nor is a gated delta net.

    Of experts, those count that tokens meet on average, if each chooses by chance. `dtype` is that of the KV cache, and
    of the weights in memory unless there is a `weight_dtype`; each of `batch` sequences has `context` tokens.
    """
    if model.quantization is not None or not all(
        isinstance(layer.mixer, AttentionShape | GatedDeltaShape | None) for layer in model.layers
    ):
        return None
    weights = head_weights(model) + decode_weights(model, batch)
    cache = sum(batch * _kept_bytes(layer.mixer, dtype, context) for layer in model.layers)
    return weights * (weight_dtype or dtype).itemsize + cache


def head_weights(model: ModelConfig) -> int:
    """Return how many weights the head has: as many as the embedding."""
    return model.vocab_size * model.hidden_size


def decode_weights(model: ModelConfig, num_tokens: int) -> int:
    """Return how many weights of all layers a step of `num_tokens` reads."""
    size = model.hidden_size
    return sum(
        _mixer_weights(layer.mixer, size) + _feed_forward_weights(layer.feed_forward, size, num_tokens)
        for layer in model.layers
    )


def _mixer_weights(shape: MixerShape | None, size: int) -> int:
    if isinstance(shape, GatedDeltaShape):
        sizes = shape.sizes
        values = sizes.num_value_heads * sizes.value_dim
        return size * (sizes.num_features + 2 * values + sizes.num_gates)
    if isinstance(shape, AttentionShape):
        queries = shape.num_heads * (2 if shape.output_gate else 1)
        keys, values = shape.head_dim, shape.value_size
        return size * (keys * (queries + shape.num_kv_heads) + values * (shape.num_kv_heads + shape.num_heads))
    return 0


def _kept_bytes(shape: MixerShape | None, dtype: torch.dtype, context: int) -> int:
    """Return the bytes that a step reads of what a layer keeps of one sequence."""
    if isinstance(shape, GatedDeltaShape):
        return math.prod(shape.sizes.state_shape) * _STATE_BYTES
    if isinstance(shape, AttentionShape):
        return shape.num_kv_heads * (shape.head_dim + shape.value_size) * context * dtype.itemsize
    return 0


def _feed_forward_weights(shape: FeedForwardShape | None, size: int, batch: int) -> int:
    """Return the numbers that the matrices of a block have, of which tokens meet any."""
    if isinstance(shape, MixtureShape):
        met = shape.num_experts * (1 - (1 - shape.rule.top_k / shape.num_experts) ** batch)
        return round(size * (3 * (met * shape.expert_size + shape.shared_size) + shape.num_experts))
    if shape is None:
        return 0
    if isinstance(shape, DenseAndMixtureShape):
        return sum(_feed_forward_weights(part, size, batch) for part in (shape.dense, shape.mixture))
    assert isinstance(shape, GatedShape | PlainShape)
    return (3 if isinstance(shape, GatedShape) else 2) * size * shape.inner_size
