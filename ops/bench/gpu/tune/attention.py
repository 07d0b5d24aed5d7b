"""Entries of the tables of paged attention: for each head size, launches near the reasoned one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.gpu_config import gpu_of
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from ops.bench.gpu.case import Check, relative_error, sets_for
from ops.bench.gpu.cases.attention import Batch, make_batch
from ops.bench.gpu.shapes import LLAMA3_8B, ModelShape
from ops.bench.gpu.tune.choice import Entry, Problem, Tuning

_TOLERANCE = 1e-2
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
# Most models have heads of 128, so that entry comes first: time may run out.
_SHAPES = {
    128: LLAMA3_8B,
    64: replace(LLAMA3_8B, name="heads of 64", head_dim=64),
    256: replace(LLAMA3_8B, name="heads of 256", num_heads=16, head_dim=256),
}
Lengths = list[tuple[int, int]]
Attend = Callable[[Batch, Entry], torch.Tensor]

_SPLIT_CHECKS: dict[str, Lengths] = {
    "one long": [(1, 9001)],
    "ragged": [(1, 1), (1, 15), (1, 16), (1, 777), (1, 4096)],
    "verified drafts": [(5, 5), (5, 300), (5, 1029)],
}
_SPLIT_PROBLEMS: dict[str, Lengths] = {
    "64 x 8192": [(1, 8192)] * 64,
    "256 x 1024": [(1, 1024)] * 256,
    "8 x 1024": [(1, 1024)] * 8,
    "1 x 32768": [(1, 32_768)],
}
_CHUNK_CHECKS: dict[str, Lengths] = {
    "whole prompt": [(1000, 1000)],
    "mixed": [(1, 700), (200, 200), (1, 33), (65, 1000), (1, 1)],
    "cache hits": [(17, 9001), (128, 5000)],
}
_CHUNK_PROBLEMS: dict[str, Lengths] = {
    "8192 at 8192": [(8192, 8192)],
    "2048 at 8192": [(2048, 8192)],
    "512 at 2048 + 63 decodes": [(512, 2048)] + [(1, 2048)] * 63,
    "64 at 32768": [(64, 32_768)],
}


def _attend(batch: Batch, split: SplitConfig | None = None, chunk: ChunkConfig | None = None) -> torch.Tensor:
    """Launch the kernels as told; where there is no GPU, run the dispatched op."""
    device = batch.query.device
    if device.type != "cuda":
        return batch.attend()
    from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton

    tensors = PagedAttentionBatch(
        *(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, batch.query_starts, batch.context_lens),
        batch.kv_scales,
    )
    return paged_attention_triton(
        tensors, batch.max_query_len, batch.scale, None, None, gpu_of(device), split=split, chunk=chunk
    )


def attend_split(batch: Batch, entry: Entry) -> torch.Tensor:
    """Launch the split-KV kernel by an entry."""
    return _attend(batch, split=SplitConfig(**entry))


def attend_chunk(batch: Batch, entry: Entry) -> torch.Tensor:
    """Launch the kernel for many query tokens by an entry."""
    return _attend(batch, chunk=ChunkConfig(**entry))


def make_checks(
    device: torch.device,
    entry: Entry,
    attend: Attend,
    model: ModelShape,
    lengths: dict[str, Lengths],
    cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> list[Check]:
    """Compare an entry's results with the reference in float32."""

    def error(batch_lengths: Lengths, cache_dtype: torch.dtype) -> float:
        batch = make_batch(device, model, batch_lengths).with_cache_in(cache_dtype)
        return relative_error(attend(batch, entry), batch.attend_by_reference(None, None))

    return [
        Check(name, partial(error, batch_lengths, cache_dtype), _TOLERANCE)
        for name, batch_lengths in lengths.items()
        for cache_dtype in cache_dtypes
    ]


def make_problems(
    device: torch.device,
    attend: Attend,
    model: ModelShape,
    lengths: dict[str, Lengths],
    cache_dtype: torch.dtype = torch.bfloat16,
) -> list[Problem]:
    """Make the batches, several of each so that none is found in the L2 cache."""

    def problem(name: str, batch_lengths: Lengths) -> Problem:
        cached = sum(context for _, context in batch_lengths)
        num_sets = sets_for(2 * cached * model.num_kv_heads * model.head_dim * cache_dtype.itemsize)
        batches = [make_batch(device, model, batch_lengths).with_cache_in(cache_dtype) for _ in range(num_sets)]
        return Problem(name, num_sets, lambda entry: lambda index: attend(batches[index], entry))

    return [problem(name, batch_lengths) for name, batch_lengths in lengths.items()]


def _with_programs(launches: Sequence[Entry], numbers: Sequence[int]) -> tuple[Entry, ...]:
    return tuple({**launch, "programs_per_multiprocessor": number} for launch in launches for number in numbers)


def _split_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches of different code: even numbers of stages compile to that of the odd ones below them."""
    tile = 8192 // head_dim
    launches = [
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5),
        (2 * tile, 4, 3), (2 * tile, 8, 3), (2 * tile, 8, 5), (tile // 2, 4, 5), (tile // 2, 4, 7),
    ]  # fmt: skip
    return _with_programs([_split_entry(*launch) for launch in launches], (2, 4, 8))


def _split_8bit_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches that keep converted tiles in registers."""
    tile = 8192 // head_dim
    launches = [
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5), (2 * tile, 8, 5),
        (tile // 2, 4, 3), (tile // 2, 4, 5), (tile // 2, 4, 7), (tile // 2, 8, 5),
    ]  # fmt: skip
    return _with_programs([_split_entry(*launch) for launch in launches], (2, 4, 8))


def _split_entry(block_n: int, num_warps: int, num_stages: int) -> Entry:
    return {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}


def _chunk_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches none of which spills registers on Hopper."""
    tile = 8192 // head_dim
    launches = [
        (128, tile, 8, 2), (128, tile, 8, 3), (128, tile, 8, 5), (128, tile // 2, 8, 3), (128, tile // 2, 8, 5),
        (64, tile, 4, 3), (64, tile, 8, 3), (64, tile // 2, 4, 3), (64, tile // 2, 4, 5),
    ]  # fmt: skip
    entries = [
        {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages} for m, n, warps, stages in launches
    ]
    return _with_programs(entries, (1, 2, 4))


SPLIT_ATTENTION = tuple(
    Tuning(
        "SPLIT_ATTENTION",
        head_dim,
        _split_candidates(head_dim),
        partial(make_checks, attend=attend_split, model=model, lengths=_SPLIT_CHECKS),
        partial(make_problems, attend=attend_split, model=model, lengths=_SPLIT_PROBLEMS),
    )
    for head_dim, model in _SHAPES.items()
)
SPLIT_ATTENTION_8BIT = tuple(
    Tuning(
        "SPLIT_ATTENTION_8BIT",
        head_dim,
        _split_8bit_candidates(head_dim),
        partial(make_checks, attend=attend_split, model=model, lengths=_SPLIT_CHECKS, cache_dtypes=EIGHT_BITS),
        partial(
            make_problems, attend=attend_split, model=model, lengths=_SPLIT_PROBLEMS, cache_dtype=torch.float8_e4m3fn
        ),
    )
    for head_dim, model in _SHAPES.items()
)
CHUNK_ATTENTION = tuple(
    Tuning(
        "CHUNK_ATTENTION",
        head_dim,
        _chunk_candidates(head_dim),
        partial(make_checks, attend=attend_chunk, model=model, lengths=_CHUNK_CHECKS),
        partial(make_problems, attend=attend_chunk, model=model, lengths=_CHUNK_PROBLEMS),
    )
    for head_dim, model in _SHAPES.items()
)
