"""Self-attention over the paged KV cache, with everything about the batch taken from `AttentionContext`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import KeepsTokens, LayerMemory, ReadsLayer
from gpu_worker.layers.encoder import BidirectionalAttention
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, to_stream
from gpu_worker.layers.media_inputs import attend_bidirectional, rotations_of
from gpu_worker.layers.rotations import GrowthTable, QueryGrowth, gated_rows, head_order, head_rows, rows_by_head
from kernels.activation import times_sigmoid
from kernels.layer_cache import CacheShape
from kernels.linear.rounding import InputRounding, Rows
from kernels.paged_attention import AttentionOptions
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write

# Options that attention in both directions has too.
_IN_BOTH = frozenset(
    {"num_heads", "num_kv_heads", "head_dim", "sliding_window", "scale", "rotary", "rotary_dim", "interleaved"}
    | {"head_norm", "qkv_bias", "output_bias", "output_scale", "sees_later"}
)


class HeadNorm(Enum):
    """How queries and keys are normalised, before the rotation unless it is said otherwise."""

    NONE = "none"
    HEADS = "heads"
    """Each head by itself, all with the same weights."""
    UNWEIGHTED = "unweighted"
    """Each head by itself, without weights: the same before the rotation and after it."""
    ROTATED = "rotated"
    """Each head by itself, behind the rotation."""
    WHOLE = "whole"
    """All query heads as one vector, and all key heads as one."""
    APART = "apart"
    """Each head by itself, centred as by LayerNorm, with weights of its own."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and options of an attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: Zero in the traits of a family, whose checkpoints have their own.
        sliding_window: Tokens that a query sees, itself included; None sees all.
        chunk_size: Tokens of the stretches, counted from a sequence's first token, within which tokens see one another.
        scale: What scores are multiplied by; None is `head_dim ** -0.5`.
        soft_cap: Scores are bent to stay between minus this and this, if given.
        rotary: Which of the model's rotations turns queries and keys; None turns none.
        rotary_dim: Dimensions of a head that turn, the first ones; None is all.
        interleaved: The checkpoint pairs a dimension with the next, not with the one half of `rotary_dim` further on.
        head_norm: How queries and keys are normalised.
        qkv_clip: Queries, keys and values, once normalised, are cut to stay between minus this and this, if given.
        output_scale: What the layer yields is multiplied by.
        has_sinks: Each query head has a learned score of seeing nothing.
        query_growth: By how much queries grow with their position, if they do.
        value_norm: Value heads are normalised, without weights.
        values_are_keys: The key projection yields the values too, which are its results before they are normalised.
        output_gate: The query projection yields, for each head, the query and behind it a gate, whose sigmoid the
            attended values are multiplied by.
        has_gate_matrix: The checkpoint has the gates in a matrix of their own, in the order of the heads.
        by_head: The checkpoint's one matrix yields for each head its query, key and value, not all queries first.
        reads_layer: The earlier layer whose keys and values this one attends to, having none of its own. That layer
            has the same heads, window and rotation.
        value_dim: Numbers of a value head; None is `head_dim`.
        sees_later: Tokens see later ones too, so that all tokens of a sequence have to be in one step. A window
            reaches as far to the other side, then.
        joins_images: Tokens of an image see one another in both directions, in a model that computes images so.
    """

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    sliding_window: int | None = None
    chunk_size: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    rotary: int | None = 0
    rotary_dim: int | None = None
    interleaved: bool = False
    head_norm: HeadNorm = HeadNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    output_scale: float = 1.0
    has_sinks: bool = False
    query_growth: QueryGrowth | None = None
    value_norm: bool = False
    values_are_keys: bool = False
    output_gate: bool = False
    has_gate_matrix: bool = False
    by_head: bool = False
    reads_layer: int | None = None
    value_dim: int | None = None
    sees_later: bool = False
    joins_images: bool = True
    qkv_clip: float | None = None

    @property
    def value_size(self) -> int:
        """Numbers of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to queries, keys and values, and from the attended values back."""
        modules, rows = self._qkv_modules(names)
        queries = self.num_heads * self.head_dim * (2 if self.output_gate else 1)
        keys_and_values = (self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_size)
        return {
            "qkv": LinearShape(
                tuple(f"self_attn.{module}" for module in modules),
                rows,
                hidden_size,
                Partition.COLUMN,
                has_bias=self.qkv_bias,
                order=self.qkv_order(),
                is_transposed=names.is_transposed,
                parts=(queries, *(keys_and_values if self.reads_layer is None else ())),
            ),
            "output": to_stream(
                f"self_attn.{names.output}",
                hidden_size,
                self.num_heads * self.value_size,
                has_bias=self.output_bias,
                scale=self.output_scale,
                is_transposed=names.is_transposed,
            ),
        }

    def _qkv_modules(self, names: TensorNames) -> tuple[tuple[str, ...], tuple[int, ...]]:
        num_query, num_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        num_values = self.num_kv_heads * self.value_size
        modules = names.qkv[:2] + names.qkv[1:2] if self.values_are_keys else names.qkv
        rows: tuple[int, ...] = (num_query * (2 if self.output_gate else 1), num_kv, num_values)
        if self.has_gate_matrix:
            rows = (num_query, num_query, num_kv, num_values)
        if self.reads_layer is not None:
            modules, rows = modules[:1], rows[:1]
        return modules, rows if len(modules) == len(rows) else (sum(rows),)

    def _head_order(self) -> list[int] | None:
        if self.rotary is None:
            return None
        return head_order(self.head_dim, self.rotary_dim or self.head_dim, is_interleaved=self.interleaved)

    def qkv_order(self) -> torch.Tensor | None:
        """Return the order of the rows of queries, keys and values; None where it is the checkpoint's."""
        order, dim = self._head_order(), self.head_dim
        if self.by_head:
            assert self.num_heads == self.num_kv_heads
            return rows_by_head(order or list(range(dim)), self.num_heads)
        if order is None and not self.has_gate_matrix:
            return None
        order = order or list(range(dim))
        if self.has_gate_matrix:
            queries = gated_rows(order, self.num_heads)
        else:
            # The gate of a head stands behind its query.
            queries = head_rows([*order, *range(dim, 2 * dim)] if self.output_gate else order, self.num_heads)
        if self.reads_layer is not None:
            return queries
        keys = head_rows(order, self.num_kv_heads, len(queries))
        values = torch.arange(self.num_kv_heads * self.value_size) + len(queries) + self.num_kv_heads * dim
        return torch.cat((queries, keys, values))

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: keys and values, or nothing where it reads an earlier layer's."""
        return self.kept_tokens() if self.reads_layer is None else ReadsLayer(self.reads_layer)

    def kept_tokens(self) -> KeepsTokens:
        """Describe its keys and values."""
        windows = [window for window in (self.sliding_window, self.chunk_size) if window is not None]
        return KeepsTokens(CacheShape(self.num_kv_heads, self.head_dim, self.value_size), min(windows, default=None))

    def take(self, source: LayerSource, prefix: str) -> AttentionWeights:
        """Take the weights of the layer `prefix`."""
        name = f"{prefix}.self_attn"
        linears = source.linears(prefix, self.linears(source.block.names, source.hidden_size))
        qkv, output = linears["qkv"], linears["output"]
        sinks = source.checkpoint.take(f"{name}.sinks", self.num_heads).float() if self.has_sinks else None
        head_norm = self._take_head_norm(source, name)
        if self.head_norm is not HeadNorm.ROTATED or head_norm is None:
            return AttentionWeights(self, qkv, output, head_norm, sinks)
        ones = torch.ones_like(head_norm.query)
        factors = (head_norm.query.float() * head_norm.key.float()).to(ones.dtype)
        return AttentionWeights(self, qkv, output, HeadNormWeights(ones, ones, head_norm.eps), sinks, factors)

    def _take_head_norm(self, source: LayerSource, name: str) -> HeadNormWeights | None:
        if self.head_norm is HeadNorm.NONE:
            return None
        if self.head_norm is HeadNorm.UNWEIGHTED:
            ones = source.checkpoint.ones(self.head_dim)
            return HeadNormWeights(ones, ones, source.eps)
        is_one_head, order = self.head_norm in (HeadNorm.HEADS, HeadNorm.ROTATED), self._head_order()

        def take(part: str, num_heads: int) -> torch.Tensor:
            count = 1 if is_one_head else num_heads
            if self.head_norm is HeadNorm.APART:
                weight = source.norms_of_heads(f"{name}.{part}_norm", count, self.head_dim)
            else:
                weight = source.norm(f"{name}.{part}_norm", count * self.head_dim).weight
            return weight if order is None else weight[head_rows(order, count).to(weight.device)]

        query = take("q", self.num_heads)
        key = take("k", self.num_kv_heads) if self.reads_layer is None else query
        return HeadNormWeights(query, key, source.eps)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Self-attention.

    Attributes:
        qkv: Yields the query heads, then the key heads, then the value heads; only queries where the layer reads
            another's cache. The dimensions of query and key heads are in the order of `rotary_order.head_order`.
        head_norm: Of query and key heads: `[head_dim]` each, or `[num_heads * head_dim]` and
            `[num_kv_heads * head_dim]` (`WHOLE`, `APART`). Where there are no keys their weights mean nothing.
        sinks: `[num_heads]` float32, where the shape says so.
        query_factors: `[head_dim]`, what rotated queries are multiplied by: where heads are normalised after the
            rotation, the norm's weights of queries times those of keys. Keys are cached without their weights.
    """

    shape: AttentionShape
    qkv: Projection
    output: Projection
    head_norm: HeadNormWeights | None = None
    sinks: torch.Tensor | None = None
    query_factors: torch.Tensor | None = None

    def block(self, parts: LayerParts, index: int) -> Attention | BidirectionalAttention:
        """Make the block; `index` is the layer's number, by which it finds its cache."""
        shape, qkv, output = self.shape, parts.linear(self.qkv), parts.linear(self.output)
        cos_sin = parts.rotations.of(shape.rotary, shape.head_dim, shape.rotary_dim)
        if not shape.sees_later:
            return Attention(index, self, qkv, output, cos_sin, parts)
        is_plain = all(field.name in _IN_BOTH or getattr(shape, field.name) == field.default for field in fields(shape))
        assert is_plain, "attention in both directions has no such option"
        assert shape.head_norm in (HeadNorm.NONE, HeadNorm.HEADS)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        return BidirectionalAttention(sizes, shape.scale, shape.sliding_window, self.head_norm, qkv, output, cos_sin)


class Attention:
    """Grouped-query attention, with what `AttentionShape` says."""

    def __init__(
        self,
        index: int,
        weights: AttentionWeights,
        qkv: Linear,
        output: Linear,
        cos_sin: torch.Tensor,
        parts: LayerParts,
    ) -> None:
        self._index, self._weights, self._shape = index, weights, weights.shape
        self._qkv, self._output = qkv, output
        self._cos_sin, self._norm, self._attend = cos_sin, parts.vector_norm(), parts.attention()
        growth = weights.shape.query_growth
        self._growth = None if growth is None else GrowthTable(growth, len(cos_sin), cos_sin.device)
        shape = weights.shape
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        limits = shape.sliding_window, shape.soft_cap
        self._options = AttentionOptions(scale, *limits, weights.sinks, shape.chunk_size)

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how its input may be rounded."""
        return self._qkv.rounding(context)

    def __call__(self, x: Rows, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Write the keys and values of `x` into the cache, if the layer has any, and attend from `x` to the cache."""
        num_tokens, shape, weights = len(x), self._shape, self._weights
        qkv, gate = self._split_gate(self._qkv(x, context))
        self._normalise(qkv)
        cache = context.caches[self._index]
        slot_mapping, block_tables = context.blocks_of(self._index)
        reads_other = shape.reads_layer is not None
        cos_sin, places = rotations_of(context.media, self._cos_sin, positions)
        qkv, values = self._split_values(qkv)
        query = rope_kv_write(
            qkv.view(num_tokens, -1, shape.head_dim),
            places,
            cos_sin,
            None if reads_other else cache.keys,
            None if reads_other else cache.values,
            slot_mapping,
            None if shape.head_norm in (HeadNorm.WHOLE, HeadNorm.APART) else weights.head_norm,
            None if reads_other else cache.scales,
            values,
        )
        query = self._scaled(query, positions)
        if (scored := context.scored) is not None:
            scored.add(query[scored.tokens], cache, block_tables, self._options)
        attended = self._attend(
            query,
            cache,
            block_tables,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            options=self._options,
        )
        if shape.joins_images:
            attended = attend_bidirectional(context.media, attended, query, cache, block_tables, self._options)
        attended = attended.view(num_tokens, -1)
        return self._output(attended if gate is None else times_sigmoid(attended, gate), context)

    def _normalise(self, qkv: torch.Tensor) -> None:
        shape, norm, dim = self._shape, self._weights.head_norm, self._shape.head_dim
        if shape.head_norm is HeadNorm.WHOLE:
            assert norm is not None
            num_query, num_key = shape.num_heads * dim, shape.num_kv_heads * dim
            query, key = qkv[:, :num_query], qkv[:, num_query : num_query + num_key]
            query.copy_(self._norm(query, norm.query, norm.eps))
            key.copy_(self._norm(key, norm.key, norm.eps))
        elif shape.head_norm is HeadNorm.APART:
            assert norm is not None
            weights = torch.cat((norm.query, norm.key)).view(-1, dim)
            heads = qkv[:, : weights.numel()].view(len(qkv), -1, dim)
            heads.copy_(torch.layer_norm(heads.float(), (dim,), eps=norm.eps) * weights)
        if shape.value_norm:
            assert norm is not None
            values = qkv[:, -shape.num_kv_heads * dim :].view(qkv.shape[0], -1, dim)
            values.copy_(torch.rms_norm(values.float(), (dim,), None, norm.eps))
        if shape.qkv_clip is not None:
            qkv.clamp_(-shape.qkv_clip, shape.qkv_clip)

    def _scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._weights.query_factors is not None:
            query = query * self._weights.query_factors
        return query if self._growth is None else self._growth.scaled(query, positions)

    def _split_gate(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._shape.output_gate:
            return qkv, None
        num_tokens, dim = qkv.shape[0], self._shape.head_dim
        num_features = self._shape.num_heads * dim
        pairs = qkv[:, : 2 * num_features].view(num_tokens, -1, 2, dim)
        query, gate = (part.reshape(num_tokens, num_features) for part in pairs.unbind(2))
        return torch.cat((query, qkv[:, 2 * num_features :]), dim=1), gate

    def _split_values(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = self._shape
        if shape.value_dim is None:
            return qkv, None
        num_values = shape.num_kv_heads * shape.value_dim
        return qkv[:, :-num_values], qkv[:, -num_values:].view(len(qkv), -1, shape.value_dim)
