"""The attention launches that compile checks look at: decodes and chunks of the shapes that models have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from kernels.quantized_kv import is_quantized, scales_shape


def launch(
    gpu: Gpu,
    num_seqs: int,
    query_len: int,
    head_dim: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_kv_heads: int = 8,
    block_size: int = 16,
    cache_dtype: torch.dtype = torch.bfloat16,
    has_trees: bool = False,
    split: SplitConfig | None = None,
    chunk: ChunkConfig | None = None,
) -> torch.Tensor:
    """Launch attention over caches that are never read, of as few blocks as will do."""
    cache = torch.empty(2, block_size, num_kv_heads, head_dim, dtype=cache_dtype)
    batch = PagedAttentionBatch(
        torch.empty(num_seqs * query_len, 4 * num_kv_heads, head_dim, dtype=torch.bfloat16),
        cache,
        torch.empty_like(cache),
        torch.empty(num_seqs, 2048, dtype=torch.int32),
        torch.empty(num_seqs + 1, dtype=torch.int32),
        torch.empty(num_seqs, dtype=torch.int32),
        torch.empty(scales_shape(2, block_size, num_kv_heads), dtype=torch.float16)
        if is_quantized(cache_dtype)
        else None,
        torch.empty(num_seqs * query_len, dtype=torch.int64) if has_trees else None,
    )
    return paged_attention_triton(batch, query_len, head_dim**-0.5, sliding_window, soft_cap, gpu, split, chunk)


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    chunk = 64
    return {
        "decode_one": partial(launch, gpu, 1, 1, 128),
        "decode_many": partial(launch, gpu, 256, 1, 128),
        "decode_256": partial(launch, gpu, 64, 1, 256, 1024, 50.0),
        "decode_80": partial(launch, gpu, 256, 1, 80),
        "verify": partial(launch, gpu, 256, 5, 128),
        "verify_trees": partial(launch, gpu, 256, 16, 128, has_trees=True),
        "verify_trees_256": partial(launch, gpu, 64, 16, 256, 1024, 50.0, has_trees=True),
        "chunk_64": partial(launch, gpu, 1, chunk, 64),
        "chunk_128": partial(launch, gpu, 1, chunk, 128),
        "chunk_128_window": partial(launch, gpu, 1, chunk, 128, 4096),
        "chunk_256": partial(launch, gpu, 1, chunk, 256),
        "chunk_256_capped": partial(launch, gpu, 1, chunk, 256, 1024, 50.0),
        "chunk_64_trees": partial(launch, gpu, 1, chunk, 64, has_trees=True),
        "chunk_128_trees": partial(launch, gpu, 1, chunk, 128, has_trees=True),
        "chunk_128_window_trees": partial(launch, gpu, 1, chunk, 128, 4096, has_trees=True),
        "chunk_256_capped_trees": partial(launch, gpu, 1, chunk, 256, 1024, 50.0, has_trees=True),
    }
