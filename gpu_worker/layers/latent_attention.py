"""Attention by latent vectors (MLA) over a paged cache that holds one short row for each token.

Keys and values are not made: the key matrix is applied to the query instead, and the value matrix to the sum of latent
vectors. So the query heads of a token are the heads of one KV head, whose keys are the cached rows and whose values are
their first numbers. On a CPU prompts are computed in this form too: a token's result does not depend on how its prompt
was cut. Elsewhere steps of long prompts make keys and values, which takes fewer multiplications.
Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpu_worker.layers.attention_context import AttentionContext, StepSizes
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import KeepsTokens, LayerMemory
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, LinearShape, Partition, Projection
from gpu_worker.layers.rotations import GrowthTable, QueryGrowth
from kernels.layer_cache import EVERY_TOKEN, CachedTokens, CacheShape
from kernels.linear.dense import make_head_linear
from kernels.linear.rounding import InputRounding, Rows, common_rounding
from kernels.paged_attention import AttentionOptions, expanded_attention, is_expansion_less, products_saved
from kernels.rms_norm import rms_norm, rms_norm_rounded
from kernels.rope_kv_write import rope_kv_write

# Of the normalisations within attention, whatever that of the layers is.
_EPS = 1e-6
# What an H200 multiplies, at 400 TFLOP/s, in the 0.3 ms that the host takes for some 28 launches of a layer. The device
# computes the rest of the layer meanwhile, so launches cost no more than this.
_PRODUCTS_OF_LAUNCHES = 60_000_000_000


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Attention whose keys and values are made of one small vector a token, the latent one, which is all that is kept.

    Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Attributes:
        num_heads: Of queries, and of the keys and values that the latent vector stands for.
        query_rank: Features between the two matrices of the queries; None where one matrix makes them.
        plain_dim: Dimensions of a key head that do not turn.
        rotary_dim: Dimensions that do, behind them; all heads have the same numbers there.
        interleaved: Dimensions are paired with the next, not with the one half of `rotary_dim` further on.
        has_bias: Projections from and to the stream have a bias, but for that of the queries where it is one matrix.
        query_growth: By how much queries grow with their position, if they do.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    has_bias: bool = False
    query_growth: QueryGrowth | None = None

    @property
    def key_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.latent_dim + self.rotary_dim

    def can_expand(self, device: torch.device, tokens: CachedTokens) -> bool:
        """Return True where steps of prompts may make keys and values.

        On a CPU a token's result does not depend on how its prompt was cut, so there is one form. Where some tokens
        alone are cached here, we attend for the heads of others too, of whose vectors we make no keys.
        """
        return device.type != "cpu" and tokens == EVERY_TOKEN

    def expands(self, sizes: StepSizes) -> bool:
        """Return True where a step makes keys and values, which is less to multiply and takes little memory.

        The latent vectors are gathered of no more tokens than the step or the longest sequence has, so what the warm-up
        takes is the most, but for the ends of sequences' last blocks.
        """
        is_within = sizes.num_cached <= max(sizes.num_tokens, sizes.max_model_len)
        return is_within and is_expansion_less(*self._sums(sizes))

    def outweighs_launches(self, sizes: StepSizes) -> bool:
        """Return True where keys and values save more than it takes the host to launch a layer kernel by kernel."""
        return self.num_heads * products_saved(*self._sums(sizes)) > _PRODUCTS_OF_LAUNCHES

    def _sums(self, sizes: StepSizes) -> tuple[int, int, int, int, int, int]:
        dims = (self.plain_dim, self.latent_dim, self.value_dim)
        return (*dims, sizes.num_tokens, sizes.num_pairs, sizes.num_cached)

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to queries and latent vectors, what makes keys and values of these, and that back."""
        rank, query_rows = self.query_rank, self.num_heads * (self.plain_dim + self.rotary_dim)
        up_rows = self.num_heads * (self.plain_dim + self.value_dim)
        whole, heads = Partition.REPLICATED, Partition.COLUMN

        def linear(module: str, rows: int, columns: int, partition: Partition, has_bias: bool) -> LinearShape:
            return LinearShape((f"self_attn.{module}",), (rows,), columns, partition, has_bias)

        queries = {"query": linear("q_proj", query_rows, hidden_size, heads, False)}
        if rank is not None:
            queries = {
                "query_down": linear("q_a_proj", rank, hidden_size, whole, self.has_bias),
                "query": linear("q_b_proj", query_rows, rank, heads, False),
            }
        return {
            **queries,
            # Read as plain numbers.
            "up": replace(
                linear("kv_b_proj", up_rows, self.latent_dim, heads, False), is_rounded=False, is_absorbed=True
            ),
            "latent": linear("kv_a_proj_with_mqa", self.key_dim, hidden_size, whole, self.has_bias),
            "output": linear("o_proj", hidden_size, self.num_heads * self.value_dim, Partition.ROW, self.has_bias),
        }

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: a latent vector a token."""
        return KeepsTokens(CacheShape(1, self.key_dim, self.latent_dim, is_latent=True))

    def take(self, source: LayerSource, prefix: str) -> LatentWeights:
        """Take the weights of the layer `prefix`, what makes keys and values of a latent vector divided by heads."""
        name, rank = f"{prefix}.self_attn", self.query_rank
        shapes = self.linears(source.block.names, source.hidden_size)
        up = shapes.pop("up")
        linears = source.linears(prefix, shapes)
        norm = source.checkpoint.take(f"{name}.kv_a_layernorm.weight", self.latent_dim)
        keys_up, values_up = self._take_up(source, prefix, up, norm.dtype)
        return LatentWeights(
            self,
            linears.get("query_down"),
            None if rank is None else source.checkpoint.take(f"{name}.q_a_layernorm.weight", rank),
            linears["query"],
            linears["latent"],
            norm,
            _EPS,
            keys_up,
            values_up,
            linears["output"],
        )

    def _take_up(
        self, source: LayerSource, prefix: str, up: LinearShape, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checkpoint = source.checkpoint
        keys, values = (f"{prefix}.self_attn.{part}_b_proj.weight" for part in "kv")
        if checkpoint.has(keys):
            keys_up = checkpoint.take(keys, self.num_heads, self.latent_dim, self.plain_dim).to(dtype)
            values_up = checkpoint.take(values, self.num_heads, self.value_dim, self.latent_dim).to(dtype)
            return keys_up.transpose(1, 2).contiguous(), values_up.transpose(1, 2).contiguous()
        weight = source.linear(prefix, up).weight.dequantize()
        heads = weight.to(dtype).view(self.num_heads, -1, self.latent_dim)
        return heads[:, : self.plain_dim].contiguous(), heads[:, self.plain_dim :].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Attention by latent vectors.

    Attributes:
        query_down: To `query_rank` features, which `query_norm` normalises; None where there is one matrix.
        query_norm: `[query_rank]`.
        latent: Yields the latent vector, which `latent_norm` normalises, and the dimensions that turn.
        latent_norm: `[latent_dim]`.
        key_up: `[num_heads, plain_dim, latent_dim]`, from a latent vector to the keys.
        value_up: `[num_heads, latent_dim, value_dim]`, to the values.
    """

    shape: LatentShape
    query_down: Projection | None
    query_norm: torch.Tensor | None
    query: Projection
    latent: Projection
    latent_norm: torch.Tensor
    eps: float
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Projection

    def block(self, parts: LayerParts, index: int) -> LatentAttention:
        """Make the block; `index` is the layer's number, by which it finds its cache."""
        return LatentAttention(index, self, parts)


class LatentAttention:
    """Multi-head latent attention."""

    def __init__(self, index: int, weights: LatentWeights, parts: LayerParts) -> None:
        self._index = index
        self._shape = weights.shape
        self._eps = weights.eps
        self._query_norm = weights.query_norm
        self._latent_norm = weights.latent_norm
        self._attend, self._options = parts.attention(), AttentionOptions(weights.shape.scale)
        can_expand = weights.shape.can_expand(weights.key_up.device, parts.cached_tokens)
        self._expansion = (weights.key_up, weights.value_up) if can_expand else None
        self._key_up = make_head_linear(weights.key_up)
        self._value_up = make_head_linear(weights.value_up)
        self._query_down = None if weights.query_down is None else parts.linear(weights.query_down)
        self._query = parts.linear(weights.query)
        self._latent = parts.linear(weights.latent)
        self._output = parts.linear(weights.output)
        readers = (self._query if self._query_down is None else self._query_down, self._latent)
        self._rounding = common_rounding([linear.input_rounding for linear in readers])
        self._cos_sin = cos_sin = parts.rotations.of(0, weights.shape.rotary_dim)
        growth = weights.shape.query_growth
        self._growth = None if growth is None else GrowthTable(growth, len(cos_sin), cos_sin.device)

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how its input may be rounded."""
        return self._rounding if context.may_round else None

    def __call__(self, x: Rows, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Write the latent vectors of `x` into the cache, and attend from `x` to the cache."""
        query, latent = self._project(x, context)
        attend = self._attend_expanded if context.expanded is not None else self._attend_latent
        return self._output(attend(query, latent, positions, context).flatten(1), context)

    def _project(self, x: Rows, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the plain queries, and behind them the row that is kept of each token."""
        query_input = x
        if self._query_down is not None:
            assert self._query_norm is not None
            query_down, rounding = self._query_down(x, context), self._query.rounding(context)
            if rounding is None:
                query_input = rms_norm(query_down, self._query_norm, self._eps)
            else:
                query_input = rms_norm_rounded(query_down, self._query_norm, self._eps, None, rounding)
        query = self._query(query_input, context).view(len(x), self._shape.num_heads, -1)
        return query, self._latent(x, context)

    def _attend_latent(
        self, query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        shape, cache = self._shape, context.caches[self._index]
        heads = latent.new_empty(len(latent), shape.num_heads + 1, shape.key_dim)
        self._key_up(query[..., : shape.plain_dim], heads[:, :-1, : shape.latent_dim])
        heads[:, :-1, shape.latent_dim :] = query[..., shape.plain_dim :]
        attended = self._attend(
            self._scaled(self._keep(heads, latent, positions, context), positions),
            cache,
            context.block_tables,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            options=self._options,
        )
        return self._value_up(attended, attended.new_empty(len(query), shape.num_heads, shape.value_dim))

    def _attend_expanded(
        self, query: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        shape, cache = self._shape, context.caches[self._index]
        assert self._expansion is not None, "the step is of a device with one form"
        assert context.expanded is not None
        self._keep(latent.new_empty(len(latent), 1, shape.key_dim), latent, positions, context)
        turned = rope_kv_write(
            query,
            positions,
            self._cos_sin,
            None,
            None,
            context.slot_mapping,
            None,
            first_rotated=shape.plain_dim,
            is_interleaved=shape.interleaved,
        )
        return expanded_attention(
            self._scaled(turned, positions),
            cache,
            *self._expansion,
            context.expanded,
            context.query_starts,
            context.context_lens,
            context.max_query_len,
            context.max_context_len,
            self._options,
        )

    def _keep(
        self, heads: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Put each token's cached row behind its heads, write it into the cache, and return the heads rotated."""
        shape, cache = self._shape, context.caches[self._index]
        heads[:, -1, : shape.latent_dim] = rms_norm(latent[:, : shape.latent_dim], self._latent_norm, self._eps)
        heads[:, -1, shape.latent_dim :] = latent[:, shape.latent_dim :]
        return rope_kv_write(
            heads,
            positions,
            self._cos_sin,
            cache.keys,
            None,
            context.slot_mapping,
            None,
            cache.scales,
            first_rotated=shape.latent_dim,
            is_interleaved=shape.interleaved,
        )

    def _scaled(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return query if self._growth is None else self._growth.scaled(query, positions)
