"""A rank's part of a model: shapes with fewer heads, and weights, by what linear layers declare of themselves.

The parts of a layer besides linear layers are divided here, so that kinds of layers know nothing of ranks. A new kind
must be added here, or it is refused where a model is to be divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import singledispatch
from typing import Any

import torch

from gpu_worker.layers.adapters import ExpertShare
from gpu_worker.layers.attention import AttentionShape, AttentionWeights, HeadNorm
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape, AttentionBesideMamba2Weights
from gpu_worker.layers.dense_and_mixture import DenseAndMixtureShape, DenseAndMixtureWeights
from gpu_worker.layers.gated_delta_net import GatedDeltaShape, GatedDeltaWeights
from gpu_worker.layers.latent_attention import LatentShape, LatentWeights
from gpu_worker.layers.layer import LayerTraits, LayerWeights
from gpu_worker.layers.linear import Partition, Projection
from gpu_worker.layers.mamba2 import Mamba2Shape, Mamba2Weights, OutputNorm
from gpu_worker.layers.mixture import MixtureShape, MixtureWeights, SharedExpertWeights
from gpu_worker.layers.mlp import GatedShape, GatedWeights, PlainShape, PlainWeights
from gpu_worker.layers.ranks.experts import weights_of
from gpu_worker.layers.ranks.rank import Ranks
from gpu_worker.layers.short_conv import ShortConvShape, ShortConvWeights
from gpu_worker.layers.stored_matrix import columns_of, rows_of, whole
from kernels.moe import ExpertWeights


class IndivisibleError(Exception):
    """A model cannot be divided so; the message is what to say of it."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which part of a model a rank has: the arithmetic alone.

    Attributes:
        has_whole_experts: A rank has some experts, not some features of each.
        context_size: Ranks in a row that have the same key and value heads, each of some tokens.
        has_whole_mixers: A rank has all of what mixes tokens, for some sequences.
    """

    rank: int
    size: int
    has_whole_experts: bool = False
    num_redundant_experts: int | None = None
    context_size: int = 1
    has_whole_mixers: bool = False

    @classmethod
    def of(cls, ranks: Ranks) -> Division:
        """Return the part of one of these ranks."""
        redundant = ranks.num_redundant_experts
        kept = ranks.tokens.step, ranks.divides_sequences
        return cls(ranks.rank, ranks.size, ranks.has_whole_experts, redundant, *kept)

    @property
    def of_keys(self) -> Division:
        """Which of the key and value heads a rank has, as if ranks that share tokens were one."""
        return Division(self.rank // self.context_size, self.size // self.context_size)

    def count(self, num: int, what: str) -> int:
        """Return how many of these heads or features a rank has; `IndivisibleError` if they cannot be divided."""
        if num % self.size:
            raise IndivisibleError(f"{num} {what} cannot be divided among {self.size} ranks")
        return num // self.size

    def count_shared(self, num: int, what: str) -> int:
        """Do the same of what several ranks may have, each one of them, where there are fewer than ranks."""
        return 1 if num < self.size and self.size % num == 0 else self.count(num, what)

    def features(self, widths: Sequence[int], counts: Sequence[int] | None = None) -> torch.Tensor:
        """Return which features of a matrix a rank has, of each part by itself.

        Args:
            widths: Of the parts.
            counts: How many heads each part consists of: one of fewer heads than ranks is on several.

        Shapes:
            result: `[num_features]` int64
        """
        found, first = [], 0
        for width, count in zip(widths, counts or widths, strict=True):
            own = self.count_shared(count, "heads") * (width // count)
            start = self.rank * count // self.size * (width // count)
            found.append(torch.arange(first + start, first + start + own))
            first += width
        return torch.cat(found)

    def part(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return a rank's stretch of a dimension."""
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def tokens(self, vocab_size: int) -> torch.Tensor:
        """Return the tokens of the vocabulary that a rank has, as many on each: behind the last one it is repeated.

        Shapes:
            result: `[ceil(vocab_size / size)]` int64
        """
        count = -(-vocab_size // self.size)
        return torch.arange(self.rank * count, (self.rank + 1) * count).clamp_(max=vocab_size - 1)

    def projection(self, layer: Projection, rows: torch.Tensor | None = None) -> Projection:
        """Return a rank's part of a linear layer, as it declares; of one by columns these features, if given."""
        shape = layer.shape
        if shape is None or shape.partition is Partition.REPLICATED:
            return replace(layer, weight=whole(layer.weight))
        if shape.partition is Partition.COLUMN:
            rows = self.features(shape.divided_parts) if rows is None else rows
            bias = None if layer.bias is None else layer.bias[rows.to(layer.bias.device)]
            return replace(layer, weight=rows_of(layer.weight, rows), bias=bias, rows=rows)
        own = self.columns(shape.columns)
        weight, inputs = columns_of(layer.weight, own)
        bias, columns = layer.bias if self.rank == 0 else None, torch.tensor(own) if inputs is None else inputs
        return replace(layer, weight=weight, bias=bias, inputs=inputs, columns=columns)

    def columns(self, num_columns: int) -> range:
        """Return which columns a rank has of a matrix that is divided by rows."""
        count = self.count(num_columns, "features")
        return range(self.rank * count, (self.rank + 1) * count)

    def vocabulary(self, head: Projection) -> Projection:
        """Return a rank's part of the projection to the scores of the vocabulary."""
        rows = self.tokens(head.weight.shape[0])
        bias = None if head.bias is None else head.bias[rows.to(head.bias.device)]
        return replace(head, weight=rows_of(head.weight, rows), bias=bias)

    def expert_share(self, num_experts: int, inner_size: int, num_projections: int) -> ExpertShare:
        """Return which experts a rank has, or which features of each; `IndivisibleError` if they cannot be divided."""
        if not self.has_whole_experts:
            self.count(inner_size, "features of an expert")
            rows, every = self.features((inner_size,) * num_projections), range(num_experts)
            return ExpertShare(num_experts, tuple(every), every, rows, self.columns(inner_size))
        redundant = self.num_redundant_experts or 0
        if redundant > num_experts * (self.size - 1):
            raise IndivisibleError(f"{redundant} redundant experts are more than each rank needs to have all experts")
        what = f"experts, {redundant} of them redundant," if redundant else "experts"
        count = self.count(num_experts + redundant, what)
        places = tuple(place % num_experts for place in range(count * self.size))
        return ExpertShare(num_experts, places, range(self.rank * count, (self.rank + 1) * count))

    def experts(self, gate_up: ExpertWeights, down: ExpertWeights, share: ExpertShare) -> tuple[ExpertWeights, ...]:
        """Return a rank's share of experts: their first projection, and the last."""
        if share.rows is None or share.columns is None:
            return weights_of(gate_up, share.experts), weights_of(down, share.experts)
        rows = share.rows
        firsts, lasts = tuple(rows_of(form, rows) for form in gate_up.forms), []
        for form in down.forms:
            taken, inputs = columns_of(form, share.columns)
            if inputs is not None:
                raise IndivisibleError("experts whose input features are in another order cannot be divided")
            lasts.append(taken)
        bias = None if gate_up.bias is None else gate_up.bias[:, rows.to(gate_up.bias.device)]
        last_bias = down.bias if down.bias is None or self.rank == 0 else torch.zeros_like(down.bias)
        return ExpertWeights(firsts, bias), ExpertWeights(tuple(lasts), last_bias)


def divided_layer(layer: LayerTraits, division: Division) -> LayerTraits:
    """Return a layer as one rank has it, and so what it keeps; `IndivisibleError` if it cannot be divided so."""
    if layer.feed_forward is not None:
        divided_shape(layer.feed_forward, division)
    # The inner features of feed-forward blocks stand in no shape that is asked for after the weights were taken.
    if layer.mixer is None or division.has_whole_mixers:
        return layer
    return replace(layer, mixer=divided_shape(layer.mixer, division))


def divided_weights(weights: LayerWeights, division: Division) -> LayerWeights:
    """Return a rank's part of the weights of a layer."""
    names = ("feed_forward",) if division.has_whole_mixers else ("mixer", "feed_forward")
    parts: dict[str, Any] = {name: getattr(weights, name) for name in names}
    return replace(weights, **{name: _divided(part, division) for name, part in parts.items() if part is not None})


@singledispatch
def divided_shape(shape: Any, division: Division) -> Any:
    """Return a shape with a rank's heads; `IndivisibleError` if it cannot be divided so."""
    raise IndivisibleError(f"layers of kind {type(shape).__name__.removesuffix('Shape')} cannot be divided")


@divided_shape.register
def _(shape: AttentionShape, division: Division) -> AttentionShape:
    return replace(
        shape,
        num_heads=division.count(shape.num_heads, "query heads"),
        num_kv_heads=division.of_keys.count_shared(shape.num_kv_heads, "key and value heads"),
    )


@divided_shape.register
def _(shape: LatentShape, division: Division) -> LatentShape:
    return replace(shape, num_heads=division.count(shape.num_heads, "query heads"))


@divided_shape.register
def _(shape: GatedDeltaShape, division: Division) -> GatedDeltaShape:
    keys = division.count(shape.sizes.num_key_heads, "key heads of linear attention")
    values = division.count(shape.sizes.num_value_heads, "value heads of linear attention")
    return replace(shape, sizes=replace(shape.sizes, num_key_heads=keys, num_value_heads=values))


@divided_shape.register
def _(shape: Mamba2Shape, division: Division) -> Mamba2Shape:
    groups = shape.sizes.num_groups
    if groups > 1 and groups % division.size and shape.norm is not OutputNorm.NONE:
        raise IndivisibleError(f"{groups} groups of Mamba-2 heads, each normalised as one vector, cannot be divided")
    heads = division.count(shape.sizes.num_heads, "heads of Mamba-2")
    own = division.count_shared(groups, "groups of Mamba-2 heads")
    return replace(shape, sizes=replace(shape.sizes, num_heads=heads, num_groups=own))


@divided_shape.register
def _(shape: ShortConvShape, division: Division) -> ShortConvShape:
    return replace(shape, num_channels=division.count(shape.num_channels, "channels of a convolution"))


@divided_shape.register
def _(shape: AttentionBesideMamba2Shape, division: Division) -> AttentionBesideMamba2Shape:
    return replace(
        shape, attention=divided_shape(shape.attention, division), mamba2=divided_shape(shape.mamba2, division)
    )


@divided_shape.register
def _(shape: GatedShape | PlainShape, division: Division) -> GatedShape | PlainShape:
    division.count(shape.inner_size, "features of a feed-forward block")
    return shape


@divided_shape.register
def _(shape: MixtureShape, division: Division) -> MixtureShape:
    division.expert_share(shape.num_experts, shape.expert_size, shape.activation.num_projections)
    division.count(shape.shared_size, "features of the shared expert")
    return shape


@divided_shape.register
def _(shape: DenseAndMixtureShape, division: Division) -> DenseAndMixtureShape:
    divided_shape(shape.dense, division)
    divided_shape(shape.mixture, division)
    return shape


def _divided(weights: Any, division: Division) -> Any:
    own, changed = _own(weights, division), {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if field.name in own:
            continue
        if isinstance(value, Projection):
            changed[field.name] = division.projection(value)
        elif isinstance(value, _BLOCKS):
            changed[field.name] = _divided(value, division)
    return replace(weights, **(changed | dict(own)))


_BLOCKS = (AttentionWeights, Mamba2Weights, GatedWeights, MixtureWeights, SharedExpertWeights)
"""Weights that those of other blocks consist of."""


@singledispatch
def _own(weights: Any, division: Division) -> Mapping[str, Any]:
    raise IndivisibleError(f"{type(weights).__name__} cannot be divided")


@_own.register(GatedWeights)
@_own.register(PlainWeights)
@_own.register(SharedExpertWeights)
@_own.register(AttentionBesideMamba2Weights)
@_own.register(DenseAndMixtureWeights)
def _(weights: Any, division: Division) -> Mapping[str, Any]:
    return {}


@_own.register
def _(weights: MixtureWeights, division: Division) -> Mapping[str, Any]:
    gate_up, down, modules = weights.gate_up, weights.down, weights.modules
    assert modules is not None
    share = division.expert_share(gate_up.num_experts, down.shape[2], weights.activation.num_projections)
    own = dict(zip(("gate_up", "down"), division.experts(gate_up, down, share), strict=True))
    if division.num_redundant_experts is not None:
        share = replace(share, stored=(gate_up, down))
    return {**own, "modules": replace(modules, share=share)}


@_own.register
def _(weights: AttentionWeights, division: Division) -> Mapping[str, Any]:
    shape, own = weights.shape, divided_shape(weights.shape, division)
    assert weights.qkv.shape is not None
    num_queries, *of_keys = weights.qkv.shape.divided_parts
    rows = division.features((num_queries,), (shape.num_heads,))
    if of_keys:
        keys_and_values = division.of_keys.features(of_keys, (shape.num_kv_heads,) * len(of_keys))
        rows = torch.cat((rows, keys_and_values + num_queries))
    found = {
        "shape": own,
        "qkv": division.projection(weights.qkv, rows),
        "sinks": None if weights.sinks is None else division.part(weights.sinks),
    }
    norm = weights.head_norm
    if shape.head_norm in (HeadNorm.APART, HeadNorm.WHOLE) and norm is not None:
        keys = division.of_keys.features((len(norm.key),), (shape.num_kv_heads,)).to(norm.key.device)
        found["head_norm"] = type(norm)(division.part(norm.query), norm.key[keys], norm.eps)
    return found


@_own.register
def _(weights: LatentWeights, division: Division) -> Mapping[str, Any]:
    heads = {name: division.part(getattr(weights, name)) for name in ("key_up", "value_up")}
    return {"shape": divided_shape(weights.shape, division), **heads}


@_own.register
def _(weights: GatedDeltaWeights, division: Division) -> Mapping[str, Any]:
    sizes = weights.shape.sizes
    keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    features = division.features((keys, keys, values)).to(weights.conv.device)
    delta = {field.name: division.part(getattr(weights.delta, field.name)) for field in fields(weights.delta)}
    return {
        "shape": divided_shape(weights.shape, division),
        "conv": weights.conv[:, features].contiguous(),
        "delta": replace(weights.delta, **delta),
    }


@_own.register
def _(weights: Mamba2Weights, division: Division) -> Mapping[str, Any]:
    sizes = weights.shape.sizes
    groups, of_groups = sizes.num_groups * sizes.state_size, (sizes.num_groups, sizes.num_groups)
    features = division.features((sizes.inner_size, groups, groups), (sizes.num_heads, *of_groups))
    features = features.to(weights.conv.device)
    ssd, bias = weights.ssd, weights.conv_bias
    assert weights.inputs.shape is not None
    counts = (sizes.num_heads, sizes.num_heads, *of_groups, sizes.num_heads)
    inputs = division.features(weights.inputs.shape.divided_parts, counts)
    rate, step_bias, skip = map(division.part, (ssd.rate, ssd.step_bias, ssd.skip))
    return {
        "shape": divided_shape(weights.shape, division),
        "inputs": division.projection(weights.inputs, inputs),
        "conv": weights.conv[:, features].contiguous(),
        "conv_bias": None if bias is None else bias[features].contiguous(),
        "ssd": replace(ssd, rate=rate, step_bias=step_bias, skip=skip),
        "norm": None if weights.norm is None else division.part(weights.norm),
        "is_norm_spread": sizes.num_groups == 1,
    }


@_own.register
def _(weights: ShortConvWeights, division: Division) -> Mapping[str, Any]:
    bias: torch.Tensor | None = weights.bias
    return {"conv": division.part(weights.conv, 1), "bias": None if bias is None else division.part(bias)}
