"""Entries of the tables of paged attention: for each head size, launches near the reasoned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ops.bench.gpu.case import Case, CaseSpec, Check, Entry
from ops.bench.gpu.cases.attention import attention_case, attention_error, eight_bit_case
from ops.bench.gpu.shapes import LLAMA3_8B, ModelShape
from ops.bench.gpu.tune.choice import Tuning, entries_of

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
# Most models have heads of 128, so that entry comes first: time may run out.
_SHAPES = {
    128: LLAMA3_8B,
    64: replace(LLAMA3_8B, name="heads of 64", head_dim=64),
    256: replace(LLAMA3_8B, name="heads of 256", num_heads=16, head_dim=256),
}
Lengths = list[tuple[int, int]]

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


def make_checks(
    device: torch.device,
    entry: Entry,
    model: ModelShape,
    lengths: dict[str, Lengths],
    cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> list[Check]:
    """Compare an entry's results with the reference in float32."""
    return [
        Check(name, partial(attention_error, device, model, batch, cache_dtype=dtype, entry=entry), 1e-2)
        for name, batch in lengths.items()
        for dtype in cache_dtypes
    ]


def make_problems(
    model: ModelShape, lengths: dict[str, Lengths], case: Callable[..., Case] = attention_case
) -> tuple[CaseSpec, ...]:
    """Return the cases at which entries are timed."""
    return tuple(CaseSpec(name, partial(case, model=model, lengths=batch)) for name, batch in lengths.items())


def _candidates(names: str, launches: Iterable[Sequence[int]], programs: Sequence[int]) -> tuple[Entry, ...]:
    values = [(*launch, number) for launch in launches for number in programs]
    return entries_of(f"{names} num_warps num_stages programs_per_multiprocessor", values)


def _split_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches of different code: even numbers of stages compile to that of the odd ones below them."""
    tile = 8192 // head_dim
    launches = [
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5),
        (2 * tile, 4, 3), (2 * tile, 8, 3), (2 * tile, 8, 5), (tile // 2, 4, 5), (tile // 2, 4, 7),
    ]  # fmt: skip
    return _candidates("block_n", launches, (2, 4, 8))


def _split_8bit_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches that keep converted tiles in registers."""
    tile = 8192 // head_dim
    launches = [
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5), (2 * tile, 8, 5),
        (tile // 2, 4, 3), (tile // 2, 4, 5), (tile // 2, 4, 7), (tile // 2, 8, 5),
    ]  # fmt: skip
    return _candidates("block_n", launches, (2, 4, 8))


def _chunk_candidates(head_dim: int) -> tuple[Entry, ...]:
    """Return launches none of which spills registers on Hopper."""
    tile = 8192 // head_dim
    launches = [
        (128, tile, 8, 2), (128, tile, 8, 3), (128, tile, 8, 5), (128, tile // 2, 8, 3), (128, tile // 2, 8, 5),
        (64, tile, 4, 3), (64, tile, 8, 3), (64, tile // 2, 4, 3), (64, tile // 2, 4, 5),
    ]  # fmt: skip
    return _candidates("block_m block_n", launches, (1, 2, 4))


SPLIT_ATTENTION = tuple(
    Tuning(
        "SPLIT_ATTENTION",
        head_dim,
        _split_candidates(head_dim),
        partial(make_checks, model=model, lengths=_SPLIT_CHECKS),
        make_problems(model, _SPLIT_PROBLEMS),
    )
    for head_dim, model in _SHAPES.items()
)
SPLIT_ATTENTION_8BIT = tuple(
    Tuning(
        "SPLIT_ATTENTION_8BIT",
        head_dim,
        _split_8bit_candidates(head_dim),
        partial(make_checks, model=model, lengths=_SPLIT_CHECKS, cache_dtypes=EIGHT_BITS),
        make_problems(model, _SPLIT_PROBLEMS, eight_bit_case),
    )
    for head_dim, model in _SHAPES.items()
)
CHUNK_ATTENTION = tuple(
    Tuning(
        "CHUNK_ATTENTION",
        head_dim,
        _chunk_candidates(head_dim),
        partial(make_checks, model=model, lengths=_CHUNK_CHECKS),
        make_problems(model, _CHUNK_PROBLEMS),
    )
    for head_dim, model in _SHAPES.items()
)
