"""Takes the weights of a gated delta net from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.layer_traits import GatedDeltaShape
from gpu_worker.layers.layer_weights import GatedDeltaWeights, Projection
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.projections import Projections
from gpu_worker.models.weight_source import WeightSource
from kernels.gated_delta import DeltaWeights


def take_gated_delta(
    config: ModelConfig, checkpoint: WeightSource, projections: Projections, prefix: str, shape: GatedDeltaShape
) -> GatedDeltaWeights:
    """Take the weights of a layer whose tensors begin with `prefix`."""
    name, sizes, hidden_size = f"{prefix}.linear_attn", shape.sizes, config.hidden_size
    num_values = sizes.num_value_heads * sizes.value_dim
    rate = checkpoint.take_float32(f"{name}.A_log", sizes.num_value_heads).exp()
    inputs, gates = (_take_by_key_head if shape.by_key_head else _take_in_order)(projections, name, hidden_size, shape)
    conv = checkpoint.take(f"{name}.conv1d.weight", sizes.num_features, 1, shape.conv_width)
    return GatedDeltaWeights(
        shape=shape,
        inputs=inputs,
        gates=gates,
        conv=conv[:, 0].t().contiguous(),
        delta=DeltaWeights(rate, checkpoint.take_float32(f"{name}.dt_bias", sizes.num_value_heads)),
        norm=checkpoint.take(f"{name}.norm.weight", sizes.value_dim),
        eps=config.rms_norm_eps,
        output=projections.take([f"{name}.out_proj"], [hidden_size], num_values),
    )


def _take_in_order(
    projections: Projections, name: str, hidden_size: int, shape: GatedDeltaShape
) -> tuple[Projection, Projection]:
    sizes = shape.sizes
    rows = [sizes.num_features, sizes.num_value_heads * sizes.value_dim]
    inputs = projections.take([f"{name}.in_proj_qkv", f"{name}.in_proj_z"], rows, hidden_size)
    parts = [f"{name}.in_proj_b", f"{name}.in_proj_a"]
    return inputs, projections.take(parts, [sizes.num_value_heads] * 2, hidden_size)


def _take_by_key_head(
    projections: Projections, name: str, hidden_size: int, shape: GatedDeltaShape
) -> tuple[Projection, Projection]:
    """Take the features of each key head, which stand together, and put them in order."""
    sizes = shape.sizes
    ratio = sizes.num_value_heads // sizes.num_key_heads
    widths = (sizes.key_dim, sizes.key_dim, ratio * sizes.value_dim, ratio * sizes.value_dim)
    inputs, gates = (order_of_parts(sizes.num_key_heads, part) for part in (widths, (ratio, ratio)))
    return (
        projections.take([f"{name}.in_proj_qkvz"], [len(inputs)], hidden_size, order=inputs),
        projections.take([f"{name}.in_proj_ba"], [len(gates)], hidden_size, order=gates),
    )


def order_of_parts(num_heads: int, widths: Sequence[int]) -> torch.Tensor:
    """Return where features are found that stand head by head, each head's in parts, when each part comes as a whole.

    Shapes:
        result: `[num_heads * sum(widths)]` int64
    """
    by_head = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.reshape(-1) for part in by_head.split_with_sizes(list(widths), dim=1)])
