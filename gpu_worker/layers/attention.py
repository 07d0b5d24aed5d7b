"""Self-attention over the paged KV cache, with everything about the batch taken from `AttentionContext`."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.layer_traits import HeadNorm
from gpu_worker.layers.layer_weights import AttentionWeights
from gpu_worker.layers.query_growth import GrowthTable
from kernels.activation import times_sigmoid
from kernels.linear import Linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import rope_kv_write


class Attention:
    """Grouped-query attention, with what `AttentionShape` says."""

    __slots__ = ("_cos_sin", "_growth", "_index", "_output", "_qkv", "_scale", "_shape", "_weights")

    def __init__(
        self, index: int, weights: AttentionWeights, qkv: Linear, output: Linear, cos_sin: torch.Tensor
    ) -> None:
        """Hold the projections; `qkv` yields the query heads, then the key heads, then the value heads.

        Args:
            index: Layer number, which chooses the layer's KV cache; that of a layer without keys is another layer's.
            weights: Those of the projections are not read.
            qkv: Projection to `(num_heads + num_kv_heads) * head_dim` features, with the gates', and those of values.
            output: Projection from the attended values back.
            cos_sin: `[max_positions, head_dim]` float32, rotations.
        """
        self._index = index
        self._weights = weights
        self._shape = weights.shape
        self._qkv = qkv
        self._output = output
        self._cos_sin = cos_sin
        growth = weights.shape.query_growth
        self._growth = None if growth is None else GrowthTable(growth, len(cos_sin), cos_sin.device)
        self._scale = weights.shape.head_dim**-0.5 if weights.shape.scale is None else weights.shape.scale

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Write the keys and values of `x` into the cache, if the layer has any, and attend from `x` to the cache.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            positions: `[num_tokens]`
        """
        num_tokens, shape, weights = x.shape[0], self._shape, self._weights
        qkv, gate = self._split_gate(self._qkv(x))
        if shape.head_norm is HeadNorm.WHOLE:
            self._normalise_whole(qkv)
        elif shape.head_norm is HeadNorm.APART:
            self._normalise_apart(qkv)
        if shape.value_norm:
            self._normalise_values(qkv)
        if shape.qkv_clip is not None:
            qkv.clamp_(-shape.qkv_clip, shape.qkv_clip)
        cache = context.caches[self._index]
        slot_mapping, block_tables = context.blocks_of(self._index)
        written = cache if shape.reads_layer is None else None
        qkv, values = self._split_values(qkv)
        query = rope_kv_write(
            qkv.view(num_tokens, -1, shape.head_dim),
            positions,
            self._cos_sin,
            None if written is None else written.keys,
            None if written is None else written.values,
            slot_mapping,
            None if shape.head_norm in (HeadNorm.WHOLE, HeadNorm.APART) else weights.head_norm,
            None if written is None else written.scales,
            values,
        )
        attended = paged_attention(
            self._scaled(query, positions),
            cache.keys,
            cache.values,
            block_tables,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            self._scale,
            shape.sliding_window,
            shape.soft_cap,
            kv_scales=cache.scales,
            tree_masks=context.tree_masks,
            sinks=weights.sinks,
            chunk_size=shape.chunk_size,
        ).view(num_tokens, -1)
        return self._output(attended if gate is None else times_sigmoid(attended, gate))

    def _scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rotated queries times what the layer has for them, if anything."""
        if self._weights.query_factors is not None:
            query = query * self._weights.query_factors
        return query if self._growth is None else self._growth.scaled(query, positions)

    def _split_gate(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the queries, keys and values side by side, and the gates, `[num_tokens, num_heads * head_dim]`."""
        if not self._shape.output_gate:
            return qkv, None
        num_tokens, dim = qkv.shape[0], self._shape.head_dim
        num_features = self._shape.num_heads * dim
        pairs = qkv[:, : 2 * num_features].view(num_tokens, -1, 2, dim)
        query, gate = (part.reshape(num_tokens, num_features) for part in pairs.unbind(2))
        return torch.cat((query, qkv[:, 2 * num_features :]), dim=1), gate

    def _split_values(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries and keys, and apart from them values whose heads have another size, if they have."""
        shape = self._shape
        if shape.value_dim is None:
            return qkv, None
        num_values = shape.num_kv_heads * shape.value_dim
        return qkv[:, :-num_values], qkv[:, -num_values:].view(len(qkv), -1, shape.value_dim)

    def _normalise_values(self, qkv: torch.Tensor) -> None:
        """Normalise each value head, without weights, in place."""
        norm, dim = self._weights.head_norm, self._shape.head_dim
        assert norm is not None
        values = qkv[:, -self._shape.num_kv_heads * dim :].view(qkv.shape[0], -1, dim)
        values.copy_(torch.rms_norm(values.float(), (dim,), None, norm.eps))

    def _normalise_whole(self, qkv: torch.Tensor) -> None:
        """Normalise all query heads as one vector, and all key heads as one, in place."""
        norm, dim = self._weights.head_norm, self._shape.head_dim
        assert norm is not None
        num_query, num_key = self._shape.num_heads * dim, self._shape.num_kv_heads * dim
        query, key = qkv[:, :num_query], qkv[:, num_query : num_query + num_key]
        query.copy_(rms_norm(query, norm.query, norm.eps))
        key.copy_(rms_norm(key, norm.key, norm.eps))

    def _normalise_apart(self, qkv: torch.Tensor) -> None:
        """Normalise each query and key head by LayerNorm with its own weights, in place."""
        norm, dim = self._weights.head_norm, self._shape.head_dim
        assert norm is not None
        weights = torch.cat((norm.query, norm.key)).view(-1, dim)
        heads = qkv[:, : weights.numel()].view(len(qkv), -1, dim)
        heads.copy_(torch.layer_norm(heads.float(), (dim,), eps=norm.eps) * weights)
