"""How the Triton paged attention kernels are launched, per GPU generation and head size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu_config import GpuGeneration
from kernels.paged_attention.launch_table import CHUNK_ATTENTION, SPLIT_ATTENTION

# The reduction holds all splits of a row in registers.
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How the split-KV kernel is launched.

    Attributes:
        block_n: Cached tokens a tile.
        num_warps: Of a program.
        num_stages: Of the pipeline; the block table takes every second one.
        programs_per_multiprocessor: Enough to even out contexts of different length, few enough that what the splits
            write stays small beside what they read.
        min_split_tokens: A shorter split would spend more on its reduction than it saves.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 4
    min_split_tokens: int = 128


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """How the kernel for many query tokens is launched: `block_m` packed query rows, `block_n` cached tokens a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head size; a smaller one uses the first entry that holds it.
_SPLIT = {
    GpuGeneration[name]: {size: SplitConfig(**entry) for size, entry in entries.items()}
    for name, entries in SPLIT_ATTENTION.items()
}
_CHUNK = {
    GpuGeneration[name]: {size: ChunkConfig(**entry) for size, entry in entries.items()}
    for name, entries in CHUNK_ATTENTION.items()
}
# fp32 has no tensor cores at full precision: it serves exactness, and small tiles keep it in registers.
_FP32_SPLIT = SplitConfig(16, 4, 1)
_FP32_CHUNK = ChunkConfig(16, 16, 4, 1)


def split_config(generation: GpuGeneration, padded_head_dim: int, dtype: torch.dtype) -> SplitConfig:
    """Return the launch of the split-KV kernel."""
    if dtype == torch.float32:
        return _FP32_SPLIT
    return _SPLIT[generation][max(padded_head_dim, 64)]


def chunk_config(generation: GpuGeneration, padded_head_dim: int, dtype: torch.dtype) -> ChunkConfig:
    """Return the launch of the kernel for many query tokens."""
    if dtype == torch.float32:
        return _FP32_CHUNK
    return _CHUNK[generation][max(padded_head_dim, 64)]


def choose_num_splits(
    config: SplitConfig, num_seqs: int, num_kv_heads: int, capacity: int, num_multiprocessors: int
) -> int:
    """Return into how many programs a sequence's cached tokens are divided, at most.

    Everything it depends on is fixed in a CUDA graph: how many splits have work is decided on the device.

    Args:
        config: Of the launch.
        num_seqs: Rows of the batch, padding included.
        num_kv_heads: Programs per sequence without splitting.
        capacity: Tokens that a row of the block table can address.
        num_multiprocessors: Of the GPU.
    """
    wanted = -(-config.programs_per_multiprocessor * num_multiprocessors // (num_seqs * num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-capacity // config.min_split_tokens)))
