"""The attention launches that compile checks look at: decodes and chunks of the shapes of models, and variants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import LayerCache, is_quantized, scales_shape
from kernels.paged_attention import AttentionOptions
from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton
from tests.kernels.elementwise_launches import launch_rope


def launch(
    gpu: Gpu,
    num_seqs: int,
    query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    chunk_size: int | None = None,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Launch attention over caches that are never read; values are a part of the keys of one KV head.

    Queries have the type of the cache, or 16 bits over one of eight.
    """
    keys = torch.empty(2, 16, num_kv_heads, head_dim, dtype=cache_dtype)
    is_latent = num_kv_heads == 1
    is_8bit = is_quantized(cache_dtype)
    values = keys[..., :value_dim] if is_latent else torch.empty(2, 16, num_kv_heads, value_dim, dtype=cache_dtype)
    sinks = torch.empty(num_heads) if has_sinks else None
    batch = PagedAttentionBatch(
        torch.empty(num_seqs * query_len, num_heads, head_dim, dtype=torch.bfloat16 if is_8bit else cache_dtype),
        LayerCache(
            keys, values, torch.empty(scales_shape(2, 16, num_kv_heads), dtype=torch.float16) if is_8bit else None
        ),
        torch.empty(num_seqs, 2048, dtype=torch.int32),
        torch.empty(num_seqs + 1, dtype=torch.int32),
        torch.empty(num_seqs, dtype=torch.int32),
        AttentionOptions(head_dim**-0.5, sliding_window, soft_cap, sinks, chunk_size),
    )
    return paged_attention_triton(batch, query_len, gpu)


def plain(
    gpu: Gpu,
    num_seqs: int,
    query_len: int,
    head_dim: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Launch attention of 32 query heads and 8 KV heads, whose keys and values are of one size."""
    sizes = (num_seqs, query_len, 32, 8, head_dim, head_dim)
    return launch(gpu, *sizes, sliding_window=sliding_window, soft_cap=soft_cap, **options)


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    chunk = 64
    return {
        "decode_one": partial(plain, gpu, 1, 1, 128),
        "decode_many": partial(plain, gpu, 256, 1, 128),
        "decode_256": partial(plain, gpu, 64, 1, 256, 1024, 50.0),
        "decode_80": partial(plain, gpu, 256, 1, 80),
        "verify": partial(plain, gpu, 256, 5, 128),
        "verify_64_rows": partial(plain, gpu, 256, 9, 128),
        "chunk_64": partial(plain, gpu, 1, chunk, 64),
        "chunk_128": partial(plain, gpu, 1, chunk, 128),
        "chunk_128_window": partial(plain, gpu, 1, chunk, 128, 4096),
        "chunk_256": partial(plain, gpu, 1, chunk, 256),
        "chunk_256_capped": partial(plain, gpu, 1, chunk, 256, 1024, 50.0),
    }


def variants(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    sinks = {"has_sinks": True}
    is_hopper = gpu.generation is GpuGeneration.HOPPER
    eight_bits = {"cache_dtype": torch.float8_e4m3fn if is_hopper else torch.int8}
    return {
        "decode_sinks": partial(launch, gpu, 64, 1, 64, 8, 64, 64, sliding_window=128, **sinks),
        "chunk_sinks": partial(launch, gpu, 1, 64, 64, 8, 64, 64, sliding_window=128, **sinks),
        "chunk_chunks": partial(launch, gpu, 1, 64, 40, 8, 128, 128, chunk_size=8192),
        "chunk_192_128": partial(launch, gpu, 1, 64, 16, 16, 192, 128),
        "decode_512": partial(launch, gpu, 64, 1, 8, 2, 512, 512),
        "chunk_512": partial(launch, gpu, 1, 64, 8, 2, 512, 512),
        "decode_latent_lite": partial(launch, gpu, 64, 1, 16, 1, 576, 512),
        "decode_latent": partial(launch, gpu, 64, 1, 128, 1, 576, 512),
        "decode_latent_one": partial(launch, gpu, 1, 1, 128, 1, 576, 512),
        "verify_latent_lite": partial(launch, gpu, 64, 5, 16, 1, 576, 512),
        "chunk_latent": partial(launch, gpu, 1, 64, 16, 1, 576, 512),
        # Two tokens of 16 heads are a block.
        "chunk_latent_long": partial(launch, gpu, 1, 131_072, 16, 1, 576, 512),
        "decode_latent_8bit": partial(launch, gpu, 64, 1, 16, 1, 576, 512, **eight_bits),
        "chunk_latent_8bit": partial(launch, gpu, 1, 64, 16, 1, 576, 512, **eight_bits),
    }


def eight_bits(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    """Decodes, drafts, chunks and the write; with fp8 only where the GPU has instructions to convert it."""
    dtypes = {"int8": torch.int8}
    if gpu.generation is not GpuGeneration.AMPERE:
        dtypes["fp8"] = torch.float8_e4m3fn
    shapes = {
        "decode_one": (1, 1, 128), "decode_many": (256, 1, 128), "decode_64": (256, 1, 64),
        "decode_256": (64, 1, 256, 1024, 50.0), "verify": (256, 5, 128), "chunk_64": (1, 64, 64),
        "chunk_128": (1, 64, 128), "chunk_256_capped": (1, 64, 256, 1024, 50.0),
    }  # fmt: skip
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name, dtype in dtypes.items():
        found |= {f"{label}_{name}": partial(plain, gpu, *shape, cache_dtype=dtype) for label, shape in shapes.items()}
        found |= {}
        found[f"rope_{name}"] = partial(launch_rope, True, dtype)
    return found
