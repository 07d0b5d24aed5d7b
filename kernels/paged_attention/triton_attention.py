"""Paged attention on a GPU: launches the split-KV kernel for few query tokens, the chunk kernel for many, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from kernels.dependent_launch import dependent_launch
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import EVERY_TOKEN, LayerCache
from kernels.paged_attention.options import AttentionOptions, Partial
from kernels.paged_attention.triton_chunk import chunk_attention_kernel, reduce_chunk_splits_kernel
from kernels.paged_attention.triton_config import (
    LATENT_CHUNK,
    MAX_CHUNK_SPLITS,
    ChunkConfig,
    SplitConfig,
    choose_num_chunk_splits,
    choose_num_shares,
    chunk_config,
    most_splits,
    split_config,
)
from kernels.paged_attention.triton_split import reduce_splits_kernel, split_attention_kernel
from kernels.paged_attention.triton_tiles import AttentionShape

MAX_HEAD_DIM = 576
MAX_VALUE_DIM = 512
# The largest power of two that keys are padded to: elements behind it are multiplied apart.
_MAX_BLOCK_D = 512
# Query heads of a KV head that are taken at once, and as many of large values as leave registers for other things.
_MAX_GROUP, _MAX_GROUP_OF_LARGE = 128, 16
# Up to this many packed rows (tokens times heads of a group) a batch without chunks is bound by reading the cache.
_MAX_SPLIT_ROWS = 64
# Cached tokens of a tile whose eight bits are converted beside small heads, where the registers are enough for that.
_MAX_CONVERTED = {GpuGeneration.HOPPER: 128, GpuGeneration.BLACKWELL: 64}
# The least rows that a tensor core multiplies.
_MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class PagedAttentionBatch:
    """The tensors of one call, as `kernels.paged_attention.paged_attention` describes them."""

    query: torch.Tensor
    cache: LayerCache
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    options: AttentionOptions
    partial: Partial | None = None

    @property
    def is_latent(self) -> bool:
        """Return True where the values are the first numbers of the keys, which are read once then."""
        keys, values = self.cache.keys, self.cache.values
        return keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()

    @property
    def num_parts(self) -> int:
        """Return in how many parts the query heads of a KV head are taken."""
        num_heads = self.query.shape[1] // self.cache.keys.shape[2]
        most = _MAX_GROUP if self.block_v < _MAX_BLOCK_D else _MAX_GROUP_OF_LARGE
        return next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= most)

    @property
    def group(self) -> int:
        """Return how many query heads of a KV head are taken at once."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def num_kv_heads(self) -> int:
        """Return how many KV heads there are, or parts of their query heads."""
        return self.cache.keys.shape[2] * self.num_parts

    @property
    def block_v(self) -> int:
        """Return the power of two that values are padded to."""
        return _padded(self.cache.values.shape[3])

    @property
    def block_d(self) -> int:
        """Return the power of two that keys are padded to, or their first numbers."""
        if self.is_latent:
            return self.block_v
        return min(_padded(self.cache.keys.shape[3]), _MAX_BLOCK_D)

    @property
    def capacity(self) -> int:
        """Return how many cached tokens a sequence may have."""
        return self.block_tables.shape[1] * self.cache.keys.shape[1]

    def reach(self, num_queries: int) -> int:
        """Return how many of them as many queries of a sequence see together at most."""
        window = self.options.sliding_window
        return self.capacity if window is None else min(self.capacity, window + num_queries - 1)

    @property
    def scale_pairs(self) -> torch.Tensor | None:
        """Return both scales of a token as one int32: a GPU copies no fewer bytes at a time ahead of their use."""
        return None if self.cache.scales is None else self.cache.scales.view(torch.int32)


def _padded(size: int) -> int:
    return 1 << max(size - 1, _MIN_ROWS - 1).bit_length()


def can_run(query: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Return True where the kernels support these shapes."""
    return query.shape[2] <= MAX_HEAD_DIM and value_cache.shape[3] <= MAX_VALUE_DIM


def paged_attention_triton(
    batch: PagedAttentionBatch,
    max_query_len: int,
    gpu: Gpu,
    split: SplitConfig | None = None,
    chunk: ChunkConfig | None = None,
    *,
    in_chunks: bool = False,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises, and zeros for a query that sees no token.

    Nothing is read back from the device, and every grid follows from tensor shapes and `max_query_len`: the call can be
    captured in a CUDA graph, and replayed with other lengths up to those. How many splits share a sequence depends on
    the contexts beside it, so the last bits of a row may differ from one batch to another.

    Shapes:
        result: `[num_tokens, num_heads, value_dim]`
    """
    query = batch.query if batch.query.stride()[1:] == (batch.query.shape[2], 1) else batch.query.contiguous()
    batch = replace(batch, query=query)
    padded_head_dim = max(batch.block_d, batch.block_v)
    split = split or split_config(gpu.generation, padded_head_dim, query.dtype, batch.cache.scales is not None)
    chunk = chunk or _chunk_config(batch, padded_head_dim, gpu)
    shape, options = _shape_of(batch), batch.options
    score_scale = options.scale / options.soft_cap if options.soft_cap else options.scale * math.log2(math.e)
    dtype = query.dtype if batch.partial is None else torch.float32
    result = torch.empty(*query.shape[:2], batch.cache.values.shape[3], dtype=dtype, device=query.device)
    group = batch.group
    # Few lengths to compile for: a kernel must not be compiled while requests wait.
    rounded_query_len = triton.next_power_of_2(max_query_len)
    max_rows = _MAX_SPLIT_ROWS if batch.block_v < _MAX_BLOCK_D else _MIN_ROWS
    if not in_chunks and group * rounded_query_len <= max(max_rows, group):
        _launch_split(batch, result, shape, score_scale, rounded_query_len, split, gpu)
        return result
    # In a mixed batch the tokens of short sequences go where the cache is split: one program for all of a long context
    # would be the last to finish.
    short_len = max(1, _MIN_ROWS // group) if len(batch.context_lens) > 1 and not in_chunks else 0
    if short_len:
        _launch_split(batch, result, shape, score_scale, short_len, split, gpu)
    _launch_chunk(batch, result, shape, score_scale, short_len + 1, chunk, gpu)
    return result


def _chunk_config(batch: PagedAttentionBatch, padded_head_dim: int, gpu: Gpu) -> ChunkConfig:
    """Return the table's entry, with smaller tiles where registers would not be enough.

    That is where eight bits are converted, and before Hopper where chunks are masked.
    """
    config = chunk_config(gpu.generation, padded_head_dim, batch.query.dtype)
    is_wide = batch.is_latent and batch.block_v == _MAX_BLOCK_D and batch.cache.scales is None
    if is_wide and gpu.generation.is_datacenter and batch.query.dtype is not torch.float32:
        return LATENT_CHUNK
    if batch.options.chunk_size is not None and not gpu.generation.is_datacenter:
        config = replace(config, block_m=max(config.block_m // 2, _MIN_ROWS))
    is_datacenter, is_large = gpu.generation.is_datacenter, padded_head_dim >= 256
    most = _MAX_CONVERTED.get(gpu.generation, 0)
    if batch.cache.scales is None or (config.block_n <= most and not is_large):
        return config
    block_m = config.block_m // 2 if is_datacenter and is_large else config.block_m
    return replace(config, block_m=block_m, block_n=max(config.block_n // 2, _MIN_ROWS))


def _shape_of(batch: PagedAttentionBatch) -> AttentionShape:
    options, keys, values = batch.options, batch.cache.keys, batch.cache.values
    assert keys.stride(3) == values.stride(3) == 1, "the numbers of a head must lie side by side"
    rest = keys.shape[3] - batch.block_d
    tokens = EVERY_TOKEN if batch.partial is None else batch.partial.tokens
    # Precision: full where fp32 was asked for; 16-bit products are exact either way.
    return AttentionShape(
        group=batch.group,
        num_parts=batch.num_parts,
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        key_block=keys.stride(0),
        key_token=keys.stride(1),
        value_block=values.stride(0),
        value_token=values.stride(1),
        scale_block=0 if batch.cache.scales is None else batch.cache.scales[0].numel() // 2,
        is_latent=batch.is_latent,
        block_size=keys.shape[1],
        sliding_window=options.sliding_window or 0,
        chunk=options.chunk_size or 0,
        soft_cap=options.soft_cap or 0.0,
        precision="ieee",
        block_d=batch.block_d,
        block_v=batch.block_v,
        block_r=_padded(rest) if rest > 0 else 0,
        first=tokens.first,
        step=tokens.step,
    )


def _launch_split(
    batch: PagedAttentionBatch,
    result: torch.Tensor,
    shape: AttentionShape,
    score_scale: float,
    max_query_len: int,
    config: SplitConfig,
    gpu: Gpu,
) -> None:
    num_seqs, num_kv_heads, value_dim = len(batch.context_lens), batch.num_kv_heads, batch.cache.values.shape[3]
    num_heads, num_shares = batch.query.shape[1], choose_num_shares(config, num_kv_heads, gpu.num_multiprocessors)
    # Beyond a window nothing is read: a short one has a single split, and no reduction.
    max_splits = most_splits(config, num_shares, batch.reach(max_query_len))
    num_rows = (num_seqs + num_shares) * num_heads * max_query_len if max_splits > 1 else 0
    partial = torch.empty(num_rows, value_dim, dtype=torch.float32, device=result.device)
    partial_lse = torch.empty(num_rows, dtype=torch.float32, device=result.device)
    block_m = max(_MIN_ROWS, triton.next_power_of_2(batch.group * max_query_len))
    constants = {
        "MAX_QUERY_LEN": max_query_len,
        "MIN_TILES": -(-config.min_split_tokens // config.block_n),
        "MAX_SPLITS": max_splits,
        "SEQS": triton.next_power_of_2(num_seqs),
        "BLOCK_N": config.block_n,
        "SHAPE": shape,
    }
    caches = (batch.cache.keys, batch.cache.values, batch.scale_pairs)
    lengths = (batch.query_starts, batch.context_lens)
    lse = None if batch.partial is None else batch.partial.lse
    split_attention_kernel[(num_kv_heads, num_seqs + (num_shares if max_splits > 1 else 0))](
        *(result, lse, partial, partial_lse, batch.query, *caches, batch.block_tables, *lengths),
        batch.options.sinks if batch.partial is None else None,
        score_scale,
        *(batch.query.stride(0), batch.block_tables.stride(0)),
        *(batch.cache.keys.stride(2), batch.cache.values.stride(2)),
        num_seqs,
        num_shares,
        BLOCK_M=block_m,
        num_warps=_split_warps(config, block_m, is_8bit=batch.cache.scales is not None, gpu=gpu),
        num_stages=config.num_stages,
        **constants,
        **dependent_launch(result.device),
    )
    if max_splits > 1:
        reduce_splits_kernel[(num_seqs, num_heads * max_query_len)](
            *(result, lse, partial, partial_lse, *lengths, num_seqs, num_shares),
            num_warps=4 if batch.block_v < _MAX_BLOCK_D else 8,
            **constants,
            **dependent_launch(result.device),
        )


def _split_warps(config: SplitConfig, block_m: int, *, is_8bit: bool, gpu: Gpu) -> int:
    """Return the warps of a program: more where its rows need their registers.

    Hopper's tensor cores take operands from shared memory, unless eight bits are converted.
    """
    has_operands_in_memory = gpu.generation.is_datacenter and not is_8bit
    return config.num_warps if block_m < _MAX_SPLIT_ROWS or has_operands_in_memory else 2 * config.num_warps


def _launch_chunk(
    batch: PagedAttentionBatch,
    result: torch.Tensor,
    shape: AttentionShape,
    score_scale: float,
    min_query_len: int,
    config: ChunkConfig,
    gpu: Gpu,
) -> None:
    num_tokens, value_dim = batch.query.shape[0], batch.cache.values.shape[3]
    num_seqs, num_kv_heads, group = len(batch.context_lens), batch.num_kv_heads, batch.group
    block_m = max(config.block_m, triton.next_power_of_2(group))
    num_blocks = num_tokens // (block_m // group) + num_seqs
    num_splits = choose_num_chunk_splits(config, num_kv_heads * num_blocks, batch.capacity, gpu.num_multiprocessors)
    num_rows = num_blocks * num_kv_heads * num_splits * block_m if num_splits > 1 else 0
    partial = torch.empty(num_rows, value_dim, dtype=torch.float32, device=result.device)
    partial_lse = torch.empty(num_rows, dtype=torch.float32, device=result.device)
    constants = {
        "MIN_QUERY_LEN": min_query_len,
        "MIN_TILES": -(-config.min_split_tokens // config.block_n),
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "SHAPE": shape,
    }
    caches = (batch.cache.keys, batch.cache.values, batch.scale_pairs)
    lengths = (batch.query_starts, batch.context_lens)
    lse = None if batch.partial is None else batch.partial.lse
    # Blocks on the first axis: the others end at 65,535.
    chunk_attention_kernel[(num_blocks, num_kv_heads, num_splits)](
        *(result, lse, partial, partial_lse, batch.query, *caches, batch.block_tables, *lengths),
        batch.options.sinks if batch.partial is None else None,
        score_scale,
        batch.query.stride(0),
        batch.block_tables.stride(0),
        *(batch.cache.keys.stride(2), batch.cache.values.stride(2)),
        num_seqs,
        num_splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )
    if num_splits > 1:
        reduce_chunk_splits_kernel[(num_blocks, num_kv_heads * block_m)](
            *(result, lse, partial, partial_lse, *lengths, num_seqs, num_splits),
            BLOCK_S=MAX_CHUNK_SPLITS,
            num_warps=4,
            **constants,
        )
