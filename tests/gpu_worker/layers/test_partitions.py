"""What blocks declare of their linear layers: divided so between two devices, the two results add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from gpu_worker.execution.memory.kv_cache import allocate_groups, allocate_states
from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.layers.cache_layout import CacheLayout, LayerMemory
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer_source import LayerSource, Projections
from gpu_worker.layers.linear import LayerParts, Partition, Projection
from gpu_worker.layers.mamba2 import Mamba2Shape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape, PlainShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.short_conv import ShortConvShape
from kernels.activation import Activation
from kernels.gated_delta import DeltaSizes
from kernels.linear import LinearFactory
from kernels.linear.forms import DenseWeight
from kernels.moe import RoutingRule
from kernels.ssd import SsdSizes
from kernels.state_rows import StateRows
from tests.gpu_worker.layers.contexts import context_of_one

HIDDEN, LENGTH, CPU = 32, 9, torch.device("cpu")
DELTA, SSD = DeltaSizes(4, 8, 8, 8), SsdSizes(4, 8, 2, 8)

Part = Callable[[torch.Tensor], torch.Tensor]


class RandomTensors:
    """A checkpoint of whatever is asked for."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    take_float32 = take

    def take_rows(self, names: list[str], shapes: list[tuple[int, ...]]) -> torch.Tensor:
        return torch.cat([self.take(name, *shape) for name, shape in zip(names, shapes, strict=True)])

    def has(self, name: str) -> bool:
        return name.endswith((".bias", ".weight")) and "_b_proj" not in name


def parts_of(tensor: torch.Tensor, widths: tuple[int, ...], rank: int, dim: int = 0) -> torch.Tensor:
    """Return one half of each part of a dimension."""
    return torch.cat([part.chunk(2, dim)[rank] for part in tensor.split(list(widths), dim)], dim)


def divided(projection: Projection, rank: int) -> Projection:
    """Return a device's part of a linear layer, as it declares."""
    weight, bias, shape = projection.weight.dequantize(), projection.bias, projection.shape
    assert shape is not None
    if shape.partition is Partition.COLUMN:
        bias = None if bias is None else parts_of(bias, shape.divided_parts, rank)
        return Projection(DenseWeight(parts_of(weight, shape.divided_parts, rank)), bias)
    if shape.partition is Partition.ROW:
        return Projection(DenseWeight(weight.chunk(2, 1)[rank].contiguous()), bias if rank == 0 else None)
    return projection


def with_divided_linears(weights: Any, rank: int, **changed: Any) -> Any:
    found = {field.name: getattr(weights, field.name) for field in fields(weights)}
    linears = {name: divided(value, rank) for name, value in found.items() if isinstance(value, Projection)}
    return replace(weights, **linears, **changed)


def halved_delta(weights: Any, shape: GatedDeltaShape, half: GatedDeltaShape, rank: int) -> dict[str, Any]:
    keys, values = DELTA.num_key_heads * DELTA.key_dim, DELTA.num_value_heads * DELTA.value_dim
    delta = type(weights.delta)(*(getattr(weights.delta, f.name).chunk(2)[rank] for f in fields(weights.delta)))
    return {"shape": half, "conv": parts_of(weights.conv, (keys, keys, values), rank, 1).contiguous(), "delta": delta}


def halved_mamba2(weights: Any, shape: Mamba2Shape, half: Mamba2Shape, rank: int) -> dict[str, Any]:
    widths = (SSD.inner_size, SSD.num_groups * SSD.state_size, SSD.num_groups * SSD.state_size)
    vectors = {
        field.name: value.chunk(2)[rank]
        for field in fields(weights.ssd)
        if isinstance(value := getattr(weights.ssd, field.name), torch.Tensor)
    }
    return {
        "shape": half,
        "conv": parts_of(weights.conv, widths, rank, 1).contiguous(),
        "conv_bias": parts_of(weights.conv_bias, widths, rank),
        "ssd": replace(weights.ssd, **vectors),
        "norm": weights.norm.chunk(2)[rank],
    }


def halved_latent(weights: Any, shape: LatentShape, half: LatentShape, rank: int) -> dict[str, Any]:
    heads = {name: getattr(weights, name).chunk(2)[rank].contiguous() for name in ("key_up", "value_up")}
    return {"shape": half, **heads}


def halved_conv(weights: Any, shape: ShortConvShape, half: ShortConvShape, rank: int) -> dict[str, Any]:
    return {"conv": weights.conv.chunk(2, 1)[rank].contiguous(), "bias": weights.bias.chunk(2)[rank]}


def halved_attention(weights: Any, shape: AttentionShape, half: AttentionShape, rank: int) -> dict[str, Any]:
    return {"shape": half, "sinks": None if weights.sinks is None else weights.sinks.chunk(2)[rank]}


ATTENTION = AttentionShape(8, 4, 8, qkv_bias=True, output_bias=True, output_scale=0.5, has_sinks=True)
GATED_HEADS = AttentionShape(8, 2, 8, rotary_dim=4, interleaved=True, head_norm=HeadNorm.HEADS, output_gate=True)
NARROW_VALUES = AttentionShape(4, 2, 8, value_dim=4)
LATENT = LatentShape(4, 12, 16, 8, 4, 8, scale=0.3, has_bias=True)
MIXERS = [
    (ATTENTION, replace(ATTENTION, num_heads=4, num_kv_heads=2), halved_attention),
    (GATED_HEADS, replace(GATED_HEADS, num_heads=4, num_kv_heads=1), halved_attention),
    (NARROW_VALUES, replace(NARROW_VALUES, num_heads=2, num_kv_heads=1), halved_attention),
    (LATENT, replace(LATENT, num_heads=2), halved_latent),
    (replace(LATENT, query_rank=None), replace(LATENT, query_rank=None, num_heads=2), halved_latent),
    (GatedDeltaShape(DELTA, 4), GatedDeltaShape(DeltaSizes(2, 4, 8, 8), 4), halved_delta),
    (GatedDeltaShape(DELTA, 4, True), GatedDeltaShape(DeltaSizes(2, 4, 8, 8), 4, True), halved_delta),
    (Mamba2Shape(SSD, 4), Mamba2Shape(SsdSizes(2, 8, 1, 8), 4), halved_mamba2),
    (ShortConvShape(16, 3, True), ShortConvShape(8, 3, True), halved_conv),
]
BLOCKS = [GatedShape(24, has_bias=True, gate_scale=0.7, down_scale=1.3), PlainShape(24, Activation.GELU, has_bias=True)]


def source() -> LayerSource:
    tensors: Any = RandomTensors()
    return LayerSource(tensors, Projections(tensors), BlockTraits(norm=NormKind()), HIDDEN, 1e-6)


def parts() -> LayerParts:
    rope = RopeParameters(RopeType.DEFAULT, 1e4, 64)
    return LayerParts.made_by(LinearFactory(lambda: 0), Rotations([rope], 64, CPU))


def context_of(memory: LayerMemory) -> AttentionContext:
    """One sequence that begins with this step."""
    layout = CacheLayout((memory,)).flat()
    states = allocate_states(layout, 1, 0, CPU)
    starts, lengths = torch.tensor([0, LENGTH], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32)
    rows = StateRows(torch.zeros(1, dtype=torch.int64), starts, lengths, LENGTH)
    caches = allocate_groups(layout, [1], 16, torch.float32, CPU).layers
    return context_of_one(caches, LENGTH, states=() if states is None else states.layers, state_rows=rows)


def mixed(weights: Any, memory: LayerMemory, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = weights.block(parts(), 0)(x, torch.arange(LENGTH), context_of(memory))
    return result


@pytest.mark.parametrize(("shape", "half", "halved"), MIXERS)
def test_halves_of_a_mixer_add_up_to_the_whole(shape: Any, half: Any, halved: Any) -> None:
    weights = shape.take(source(), "model.layers.0")
    x = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole = mixed(weights, shape.memory(), x)
    both = [with_divided_linears(weights, rank, **halved(weights, shape, half, rank)) for rank in (0, 1)]
    summed = sum(mixed(each, half.memory(), x) for each in both)
    torch.testing.assert_close(summed, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", BLOCKS)
def test_halves_of_a_block_add_up_to_the_whole(shape: Any) -> None:
    weights = shape.take(source(), "model.layers.0")
    x = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    context = context_of(None)
    whole = weights.block(parts())(x, context)
    summed = sum(with_divided_linears(weights, rank).block(parts())(x, context) for rank in (0, 1))
    torch.testing.assert_close(summed, whole, atol=1e-4, rtol=1e-4)


def test_halves_of_the_expert_of_all_tokens_add_up_to_the_whole() -> None:
    shape = MixtureShape(4, 8, RoutingRule(2), shared_size=24, shared_scale=0.5, has_shared_gate=True)
    weights = shape.take(source(), "model.layers.0")
    assert weights.shared is not None
    x = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    context = context_of(None)
    whole = weights.shared.block(parts(), shape.activation)(x, context)
    halves = [with_divided_linears(weights.shared, rank) for rank in (0, 1)]
    summed = sum(half.block(parts(), shape.activation)(x, context) for half in halves)
    torch.testing.assert_close(summed, whole, atol=1e-4, rtol=1e-4)
    assert weights.router.shape is not None
    assert weights.router.shape.partition is Partition.REPLICATED
