"""Takes the weights of a gated delta net from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpu_worker.layers.layer_traits import GatedDeltaShape
from gpu_worker.layers.layer_weights import GatedDeltaWeights, Projection
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.projections import Projections
from gpu_worker.models.weight_source import WeightSource
from kernels.gated_delta import DeltaWeights
from kernels.linear.forms import reorder_columns


def take_gated_delta(
    config: ModelConfig, checkpoint: WeightSource, projections: Projections, prefix: str, shape: GatedDeltaShape
) -> GatedDeltaWeights:
    """Take the weights of a layer whose tensors begin with `prefix`."""
    name, sizes, hidden_size = f"{prefix}.linear_attn", shape.sizes, config.hidden_size
    num_values = sizes.num_value_heads * sizes.value_dim
    rate = checkpoint.take_float32(f"{name}.A_log", sizes.num_value_heads).exp()
    step_bias = checkpoint.take_float32(f"{name}.dt_bias", sizes.num_value_heads)
    conv = checkpoint.take(f"{name}.conv1d.weight", sizes.num_features, 1, shape.conv_width)[:, 0]
    output = projections.take([f"{name}.out_proj"], [hidden_size], num_values)
    if shape.values_by_turns:
        heads = value_order(shape, 1)
        rate, step_bias = (tensor[heads.to(tensor.device)] for tensor in (rate, step_bias))
        conv = conv[_behind(num_key_features(shape), value_order(shape, sizes.value_dim)).to(conv.device)]
        output = replace(output, weight=reorder_columns(output.weight, value_order(shape, sizes.value_dim)))
    return GatedDeltaWeights(
        shape=shape,
        inputs=_take_inputs(projections, name, hidden_size, shape),
        gates=_take_gates(projections, name, hidden_size, shape),
        conv=conv.t().contiguous(),
        delta=DeltaWeights(rate, step_bias),
        norm=checkpoint.take(f"{name}.norm.weight", sizes.value_dim),
        eps=config.rms_norm_eps,
        output=output,
    )


def _take_inputs(projections: Projections, name: str, hidden_size: int, shape: GatedDeltaShape) -> Projection:
    """Take queries, keys, values and the output's gates, and put them in order."""
    sizes = shape.sizes
    if shape.by_key_head:
        order = input_order(shape)
        return projections.take([f"{name}.in_proj_qkvz"], [len(order)], hidden_size, order=order)
    rows = [sizes.num_features, sizes.num_value_heads * sizes.value_dim]
    turns: torch.Tensor | None = None
    if shape.values_by_turns:
        values = value_order(shape, sizes.value_dim)
        turns = _behind(num_key_features(shape), values, values)
    return projections.take([f"{name}.in_proj_qkv", f"{name}.in_proj_z"], rows, hidden_size, order=turns)


def _take_gates(projections: Projections, name: str, hidden_size: int, shape: GatedDeltaShape) -> Projection:
    """Take strengths and steps, and put them in order."""
    sizes = shape.sizes
    if shape.by_key_head or shape.gates_by_key_head:
        ratio = sizes.num_value_heads // sizes.num_key_heads
        order = order_of_parts(sizes.num_key_heads, (ratio, ratio))
        return projections.take([f"{name}.in_proj_ba"], [len(order)], hidden_size, order=order)
    parts, heads = [f"{name}.in_proj_b", f"{name}.in_proj_a"], value_order(shape, 1)
    turns = _behind(0, heads, heads) if shape.values_by_turns else None
    return projections.take(parts, [sizes.num_value_heads] * 2, hidden_size, order=turns)


def num_key_features(shape: GatedDeltaShape) -> int:
    """Return the features of all queries and keys."""
    return 2 * shape.sizes.num_key_heads * shape.sizes.key_dim


def value_order(shape: GatedDeltaShape, width: int) -> torch.Tensor:
    """Return where the features of value heads that stand by turns are, `width` of each, when those of a key head meet.

    Shapes:
        result: `[num_value_heads * width]` int64
    """
    sizes = shape.sizes
    ratio = sizes.num_value_heads // sizes.num_key_heads
    return torch.arange(sizes.num_value_heads * width).view(ratio, sizes.num_key_heads, width).transpose(0, 1).flatten()


def _behind(count: int, *orders: torch.Tensor) -> torch.Tensor:
    """Return the order of features of which the first `count` stay, and the parts behind have orders of their own."""
    parts = [torch.arange(count)]
    for order in orders:
        parts.append(order + sum(map(len, parts)))
    return torch.cat(parts)


def input_order(shape: GatedDeltaShape) -> torch.Tensor:
    """Return where queries, keys, values and the output's gates are found in a matrix that has them by key heads.

    Shapes:
        result: `[num_features + num_value_heads * value_dim]` int64
    """
    sizes = shape.sizes
    values = sizes.num_value_heads // sizes.num_key_heads * sizes.value_dim
    return order_of_parts(sizes.num_key_heads, (sizes.key_dim, sizes.key_dim, values, values))


def order_of_parts(num_heads: int, widths: Sequence[int]) -> torch.Tensor:
    """Return where features are found that stand head by head, each head's in parts, when each part comes as a whole.

    Shapes:
        result: `[num_heads * sum(widths)]` int64
    """
    by_head = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.reshape(-1) for part in by_head.split_with_sizes(list(widths), dim=1)])
