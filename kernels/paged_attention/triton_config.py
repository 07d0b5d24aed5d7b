"""How the Triton paged attention kernels are launched, per GPU generation and head size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu_config import GpuGeneration, Rows, read_table

SPLIT_FIELDS = "block_n num_warps num_stages programs_per_multiprocessor"
SPLIT_ATTENTION: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 3, 4), 128: (64, 4, 3, 4), 256: (32, 4, 3, 4), 512: (32, 4, 3, 2)},
    "AMPERE": {64: (128, 4, 3, 4), 128: (64, 4, 3, 4), 256: (32, 4, 3, 4), 512: (16, 4, 3, 2)},
    "ADA": {64: (64, 4, 3, 4), 128: (32, 4, 3, 4), 256: (16, 4, 3, 4), 512: (16, 4, 1, 2)},
}
SPLIT_ATTENTION_8BIT: dict[str, Rows] = {
    "HOPPER": {64: (128, 4, 5, 4), 128: (64, 4, 5, 4), 256: (32, 4, 5, 4), 512: (32, 8, 3, 2)},
    "AMPERE": {64: (128, 4, 5, 4), 128: (64, 4, 5, 4), 256: (32, 4, 5, 4), 512: (16, 4, 3, 2)},
    "ADA": {64: (64, 4, 5, 4), 128: (32, 4, 5, 4), 256: (16, 4, 5, 4), 512: (16, 4, 1, 2)},
}
CHUNK_FIELDS = "block_m block_n num_warps num_stages programs_per_multiprocessor"
CHUNK_ATTENTION: dict[str, Rows] = {
    "HOPPER": {64: (128, 128, 8, 3, 2), 128: (128, 64, 8, 3, 2), 256: (128, 32, 8, 3, 2), 512: (32, 32, 8, 3, 1)},
    "AMPERE": {64: (128, 64, 8, 3, 2), 128: (128, 32, 8, 3, 2), 256: (64, 32, 8, 3, 2), 512: (32, 16, 8, 3, 1)},
    "ADA": {64: (64, 64, 4, 3, 2), 128: (64, 32, 4, 3, 2), 256: (32, 32, 4, 2, 2), 512: (16, 16, 4, 1, 1)},
}


# The reductions hold all splits of a row in registers.
MAX_SPLITS = 64
MAX_CHUNK_SPLITS = 32


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How the split-KV kernel is launched.

    Attributes:
        block_n: Cached tokens a tile.
        num_warps: Of a program.
        num_stages: Of the pipeline, odd. The block table's entry of a tile takes two of them ahead of its keys and
            values: 3, 5 and 7 keep one, two and three tiles in flight, and 4 compiles to the same code as 3.
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
    """How the kernel for many query tokens is launched.

    Attributes:
        block_m: Packed query rows of a program.
        block_n: Cached tokens a tile.
        num_warps: Of a program.
        num_stages: As in `SplitConfig`.
        programs_per_multiprocessor: What splits may come to, where blocks of queries are too few to fill the GPU.
        min_split_tokens: A shorter split would write and read as many bytes of partial results as of the cache.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 2
    min_split_tokens: int = 512


# By padded head size; a smaller one uses the first entry that holds it.
_SPLIT, _SPLIT_8BIT = (
    read_table(SplitConfig, SPLIT_FIELDS, table) for table in (SPLIT_ATTENTION, SPLIT_ATTENTION_8BIT)
)
_CHUNK = read_table(ChunkConfig, CHUNK_FIELDS, CHUNK_ATTENTION)
# Latent rows from Hopper on, which are read once for keys and values: that leaves room for the 64 rows that its matrix
# instructions take. No more tokens than these, since the sums of 512 numbers fill the registers.
LATENT_CHUNK = ChunkConfig(64, 16, 8, 3, programs_per_multiprocessor=1)
# fp32 has no tensor cores at full precision: it serves exactness, and small tiles keep it in registers.
_FP32_SPLIT = SplitConfig(16, 4, 1)
_FP32_CHUNK = ChunkConfig(16, 16, 4, 1)


def split_config(
    generation: GpuGeneration, padded_head_dim: int, dtype: torch.dtype, is_8bit_cache: bool = False
) -> SplitConfig:
    """Return the launch of the split-KV kernel for queries of `dtype`.

    A cache in eight bits has launches of its own: its tiles are half as large, and converting them takes registers.
    """
    if dtype == torch.float32:
        return _FP32_SPLIT
    return (_SPLIT_8BIT if is_8bit_cache else _SPLIT)[generation][max(padded_head_dim, 64)]


def chunk_config(generation: GpuGeneration, padded_head_dim: int, dtype: torch.dtype) -> ChunkConfig:
    """Return the launch of the kernel for many query tokens."""
    if dtype == torch.float32:
        return _FP32_CHUNK
    return _CHUNK[generation][max(padded_head_dim, 64)]


def choose_num_shares(config: SplitConfig, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return how many splits of equal length all sequences of a batch come to, in each KV head.

    The rest of each sequence is one more. All inputs of this function are fixed in a CUDA graph: the device decides how
    long a share is, and how many a sequence gets.
    """
    return -(-config.programs_per_multiprocessor * num_multiprocessors // num_kv_heads)


def most_splits(config: SplitConfig, num_shares: int, capacity: int) -> int:
    """Return into how many splits a sequence may be divided: a power of two, at most `MAX_SPLITS`."""
    wanted = max(1, min(num_shares + 1, -(-capacity // config.min_split_tokens)))
    return min(1 << (wanted - 1).bit_length(), MAX_SPLITS)


def choose_num_chunk_splits(config: ChunkConfig, num_programs: int, capacity: int, num_multiprocessors: int) -> int:
    """Return into how many programs the cached tokens of a block of queries are divided, at most.

    A batch with programs for every multiprocessor is not divided: it is bound by its products.
    """
    if num_programs >= num_multiprocessors:
        return 1
    wanted = config.programs_per_multiprocessor * num_multiprocessors // num_programs
    return max(1, min(wanted, MAX_CHUNK_SPLITS, -(-capacity // config.min_split_tokens)))
