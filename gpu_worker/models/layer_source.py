"""Takes the weights of a layer from a checkpoint, by what its traits say it consists of: one line a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_worker.layers.layer_traits import (
    AttentionBesideMamba2Shape,
    AttentionShape,
    DenseAndMixtureShape,
    GatedDeltaShape,
    GatedShape,
    HeadNorm,
    LatentShape,
    LayerInputShape,
    LayerTraits,
    Mamba2Shape,
    PlainShape,
    ShortConvShape,
)
from gpu_worker.layers.layer_weights import (
    AttentionBesideMamba2Weights,
    AttentionWeights,
    DenseAndMixtureWeights,
    FeedForward,
    GatedDeltaWeights,
    GatedWeights,
    LatentWeights,
    LayerInputWeights,
    LayerNorms,
    LayerWeights,
    Mamba2Weights,
    Mixer,
    MixtureWeights,
    NormWeights,
    PlainWeights,
    Projection,
    ShortConvWeights,
)
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.layers.rotary_order import head_order, head_rows
from gpu_worker.models.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gated_delta_source import take_gated_delta
from gpu_worker.models.latent_source import take_latent
from gpu_worker.models.mamba2_source import take_mamba2
from gpu_worker.models.mixture_source import take_mixture
from gpu_worker.models.projections import Projections
from gpu_worker.models.weight_source import WeightSource
from kernels.activation import Activation, Xielu
from kernels.rope_kv_write import HeadNormWeights


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Where the weights of layers come from.

    Attributes:
        config: Of the whole model.
        checkpoint: Holds what is no linear layer.
        projections: Where linear layers come from.
    """

    config: ModelConfig
    checkpoint: WeightSource
    projections: Projections

    def take(self, index: int) -> LayerWeights:
        """Take the weights of one layer."""
        source, block = self, self.config.block
        if index == 0 and block.first_is_bare:
            block = replace(block, names=replace(block.names, before_mixer=None))
            source = replace(self, config=replace(self.config, block=block))
        return source.take_named(f"model.layers.{index}", self.config.layer(index))

    def take_named(self, prefix: str, traits: LayerTraits) -> LayerWeights:
        """Take the weights of a layer whose tensors' names begin with `prefix`."""
        block, names = self.config.block, self.config.block.names

        def norm(name: str | None) -> NormWeights | None:
            return None if name is None else self.norm(f"{prefix}.{name}")

        mixer, feed_forward = traits.mixer, traits.feed_forward
        norms = LayerNorms(
            None if mixer is None else norm(names.before_mixer),
            None if mixer is None else norm(names.after_mixer),
            None if feed_forward is None else norm(names.before_feed_forward),
            None if feed_forward is None else norm(names.after_feed_forward),
        )
        return LayerWeights(
            None if mixer is None else _MIXERS[type(mixer)](self, prefix, mixer),
            None if feed_forward is None else _FEED_FORWARDS[type(feed_forward)](self, prefix, feed_forward),
            norms,
            block.is_parallel,
            block.residual_scale,
            self.checkpoint.take(f"{prefix}.{names.stream_scale}", 1).item() if names.stream_scale else 1.0,
            None if block.layer_inputs is None else self._layer_input(prefix, block.layer_inputs),
            block.is_post_norm,
        )

    def _layer_input(self, prefix: str, shape: LayerInputShape) -> LayerInputWeights:
        size = self.config.hidden_size
        return LayerInputWeights(
            self.projections.take([f"{prefix}.per_layer_input_gate"], [shape.size], size),
            self.projections.take([f"{prefix}.per_layer_projection"], [size], shape.size),
            self.norm(f"{prefix}.post_per_layer_input_norm"),
            shape.activation,
        )

    def norm(self, name: str, size: int | None = None) -> NormWeights:
        """Take a normalisation of the model's kind, of vectors of `size`, by default those of the stream."""
        kind, size = self.config.block.norm, size or self.config.hidden_size
        weight = self.checkpoint.take(f"{name}.weight", size)
        if kind.is_offset:
            # The sum stays in float32: the checkpoint's 16 bits were near zero, where they are finer than near one.
            weight = weight.float() + 1
        bias = self.checkpoint.take(f"{name}.bias", size) if kind.has_bias else None
        return NormWeights(weight, self.config.rms_norm_eps, bias, kind.is_centered)


def _take_attention(source: LayerSource, prefix: str, shape: AttentionShape) -> AttentionWeights:
    name, names, size = f"{prefix}.self_attn", source.config.block.names, source.config.hidden_size
    parts, rows = qkv_parts(shape, names)
    qkv = source.projections.take(
        [f"{name}.{part}" for part in parts],
        rows,
        size,
        has_bias=shape.qkv_bias,
        order=qkv_order(shape),
        is_transposed=names.is_transposed,
    )
    output = source.projections.take(
        [f"{name}.{names.output}"],
        [size],
        shape.num_heads * shape.value_size,
        has_bias=shape.output_bias,
        scales=[(size, shape.output_scale)],
        is_transposed=names.is_transposed,
    )
    sinks = source.checkpoint.take(f"{name}.sinks", shape.num_heads).float() if shape.has_sinks else None
    head_norm = _take_head_norm(source, name, shape)
    if shape.head_norm is not HeadNorm.ROTATED or head_norm is None:
        return AttentionWeights(shape, qkv, output, head_norm, sinks)
    ones = torch.ones_like(head_norm.query)
    factors = (head_norm.query.float() * head_norm.key.float()).to(ones.dtype)
    return AttentionWeights(shape, qkv, output, HeadNormWeights(ones, ones, head_norm.eps), sinks, factors)


def qkv_parts(shape: AttentionShape, names: TensorNames) -> tuple[list[str], list[int]]:
    """Return the modules, within attention, that queries, keys and values come from, and the rows of each."""
    num_query, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    num_values = shape.num_kv_heads * shape.value_size
    parts = names.qkv[:2] + names.qkv[1:2] if shape.values_are_keys else names.qkv
    rows = [num_query * (2 if shape.output_gate else 1), num_kv, num_values]
    if shape.has_gate_matrix:
        rows = [num_query, num_query, num_kv, num_values]
    if shape.reads_layer is not None:
        parts, rows = parts[:1], rows[:1]
    return list(parts), rows if len(parts) == len(rows) else [sum(rows)]


def qkv_order(shape: AttentionShape) -> torch.Tensor | None:
    """Return the order of the rows of queries, keys and values; None where it is the checkpoint's."""
    order, dim = head_order(shape), shape.head_dim
    if shape.by_head:
        return _by_head_order(shape, order or list(range(dim)))
    if order is None and not shape.has_gate_matrix:
        return None
    order = order or list(range(dim))
    if shape.has_gate_matrix:
        queries = _gated_order(shape, order)
    else:
        # The gate of a head stands behind its query.
        queries = head_rows([*order, *range(dim, 2 * dim)] if shape.output_gate else order, shape.num_heads)
    if shape.reads_layer is not None:
        return queries
    num_kv = shape.num_kv_heads * dim
    keys = head_rows(order, shape.num_kv_heads, len(queries))
    values = torch.arange(shape.num_kv_heads * shape.value_size) + len(queries) + num_kv
    return torch.cat((queries, keys, values))


def _gated_order(shape: AttentionShape, order: list[int]) -> torch.Tensor:
    """Return the order of all queries, then all gates, by which the gate of a head stands behind its query."""
    dim, heads = shape.head_dim, torch.arange(shape.num_heads)[:, None] * shape.head_dim
    queries, gates = heads + torch.tensor(order), heads + torch.arange(dim) + shape.num_heads * dim
    return torch.cat((queries, gates), dim=1).flatten()


def _by_head_order(shape: AttentionShape, order: list[int]) -> torch.Tensor:
    """Return the order of rows that lie as the query, key and value of a head, then those of the next."""
    assert shape.num_heads == shape.num_kv_heads
    dim, turned = shape.head_dim, torch.tensor(order)
    heads = torch.arange(shape.num_heads)[:, None] * 3 * dim
    parts = (turned, turned + dim, torch.arange(dim) + 2 * dim)
    return torch.cat([(heads + part).flatten() for part in parts])


def _take_head_norm(source: LayerSource, name: str, shape: AttentionShape) -> HeadNormWeights | None:
    if shape.head_norm is HeadNorm.NONE:
        return None
    if shape.head_norm is HeadNorm.UNWEIGHTED:
        ones = source.checkpoint.ones(shape.head_dim)
        return HeadNormWeights(ones, ones, source.config.rms_norm_eps)
    is_one_head, order = shape.head_norm in (HeadNorm.HEADS, HeadNorm.ROTATED), head_order(shape)

    def take(part: str, num_heads: int) -> torch.Tensor:
        count = 1 if is_one_head else num_heads
        if shape.head_norm is HeadNorm.APART:
            weight = _take_norms_of_heads(source.checkpoint, f"{name}.{part}_norm", count, shape.head_dim)
        else:
            weight = source.norm(f"{name}.{part}_norm", count * shape.head_dim).weight
        return weight if order is None else weight[head_rows(order, count).to(weight.device)]

    query = take("q", shape.num_heads)
    key = take("k", shape.num_kv_heads) if shape.reads_layer is None else query
    return HeadNormWeights(query, key, source.config.rms_norm_eps)


def _take_norms_of_heads(checkpoint: WeightSource, name: str, num_heads: int, dim: int) -> torch.Tensor:
    """Take the weights of each head's normalisation, which are stored as one tensor or as one for each head."""
    if checkpoint.has(f"{name}.0.weight"):
        return checkpoint.take_rows([f"{name}.{head}.weight" for head in range(num_heads)], [(dim,)] * num_heads)
    return checkpoint.take(f"{name}.weight", num_heads, dim).flatten()


def _take_latent(source: LayerSource, prefix: str, shape: LatentShape) -> LatentWeights:
    return take_latent(source.checkpoint, source.projections, prefix, shape, source.config.hidden_size)


def _take_short_conv(source: LayerSource, prefix: str, shape: ShortConvShape) -> ShortConvWeights:
    name, size, channels = f"{prefix}.conv", source.config.hidden_size, shape.num_channels
    conv = source.checkpoint.take(f"{name}.conv.weight", channels, 1, shape.conv_width)
    return ShortConvWeights(
        source.projections.take([f"{name}.in_proj"], [3 * channels], size, has_bias=shape.has_bias),
        conv[:, 0].t().contiguous(),
        source.checkpoint.take(f"{name}.conv.bias", channels) if shape.has_bias else None,
        source.projections.take([f"{name}.out_proj"], [size], channels, has_bias=shape.has_bias),
    )


def _take_gated_delta(source: LayerSource, prefix: str, shape: GatedDeltaShape) -> GatedDeltaWeights:
    return take_gated_delta(source.config, source.checkpoint, source.projections, prefix, shape)


def _take_mamba2(source: LayerSource, prefix: str, shape: Mamba2Shape) -> Mamba2Weights:
    return take_mamba2(source.config, source.checkpoint, source.projections, prefix, shape)


def _take_beside(source: LayerSource, prefix: str, shape: AttentionBesideMamba2Shape) -> AttentionBesideMamba2Weights:
    attention = _take_attention(source, prefix, shape.attention)
    return AttentionBesideMamba2Weights(attention, _take_mamba2(source, prefix, shape.mamba2))


def _take_gated(source: LayerSource, prefix: str, shape: GatedShape) -> GatedWeights:
    name, names, size, inner = f"{prefix}.mlp", source.config.block.names, source.config.hidden_size, shape.inner_size
    parts = [f"{name}.{part}" for part in names.gate_up]
    rows = [inner, inner] if len(parts) == 2 else [2 * inner]
    scales = [(inner, shape.gate_scale), (inner, 1.0)]
    gate_up = source.projections.take(parts, rows, size, has_bias=shape.has_bias, scales=scales)
    scales = [(size, shape.down_scale)]
    down = source.projections.take([f"{name}.{names.down}"], [size], inner, has_bias=shape.has_bias, scales=scales)
    return GatedWeights(gate_up, down, shape.activation)


def _take_plain(source: LayerSource, prefix: str, shape: PlainShape) -> PlainWeights:
    name, names, size, inner = f"{prefix}.mlp", source.config.block.names, source.config.hidden_size, shape.inner_size

    def take(part: str, rows: int, columns: int) -> Projection:
        return source.projections.take(
            [f"{name}.{part}"], [rows], columns, has_bias=shape.has_bias, is_transposed=names.is_transposed
        )

    activation = shape.activation
    return PlainWeights(
        take(names.up, inner, size),
        take(names.down, size, inner),
        _take_xielu(source.checkpoint, f"{name}.act_fn") if activation is Activation.XIELU else activation,
    )


def _take_xielu(checkpoint: WeightSource, name: str) -> Xielu:
    """Take the numbers of a layer's function."""

    def take(part: str, default: float) -> float:
        return checkpoint.take_float32(f"{name}.{part}").item() if checkpoint.has(f"{name}.{part}") else default

    above, below = (checkpoint.take_float32(f"{name}.{part}", 1).item() for part in ("alpha_p", "alpha_n"))
    return Xielu.learned(above, below, take("beta", 0.5), take("eps", -1e-6))


_MIXERS: dict[type, Callable[[LayerSource, str, Any], Mixer]] = {
    AttentionShape: _take_attention,
    LatentShape: _take_latent,
    GatedDeltaShape: _take_gated_delta,
    ShortConvShape: _take_short_conv,
    Mamba2Shape: _take_mamba2,
    AttentionBesideMamba2Shape: _take_beside,
}


def _take_mixture(source: LayerSource, prefix: str, shape: MixtureShape) -> MixtureWeights:
    return take_mixture(source.projections, prefix, shape, source.config.hidden_size)


def _take_dense_and_mixture(source: LayerSource, prefix: str, shape: DenseAndMixtureShape) -> DenseAndMixtureWeights:
    size = source.config.hidden_size
    router = source.checkpoint.take_float32(f"{prefix}.router.scale", size) * size**-0.5
    return DenseAndMixtureWeights(
        _take_gated(source, prefix, shape.dense),
        _take_mixture(source, prefix, shape.mixture),
        before_dense=source.norm(f"{prefix}.pre_feedforward_layernorm"),
        before_mixture=source.norm(f"{prefix}.pre_feedforward_layernorm_2"),
        after_dense=source.norm(f"{prefix}.post_feedforward_layernorm_1"),
        after_mixture=source.norm(f"{prefix}.post_feedforward_layernorm_2"),
        before_router=NormWeights(router, source.config.rms_norm_eps),
    )


_FEED_FORWARDS: dict[type, Callable[[LayerSource, str, Any], FeedForward]] = {
    GatedShape: _take_gated,
    PlainShape: _take_plain,
    MixtureShape: _take_mixture,
    DenseAndMixtureShape: _take_dense_and_mixture,
}
