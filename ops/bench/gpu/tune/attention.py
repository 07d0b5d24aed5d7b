"""Entries of the tables of paged attention: for each head size, launches near the reasoned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ops.bench.gpu.case import Case, CaseSpec, Check, Entry
from ops.bench.gpu.cases.attention import (
    CHUNKS_CHECKED,
    DECODES_CHECKED,
    LLAMA_ATTENTION,
    attention_case,
    attention_error,
    eight_bit_case,
)
from ops.bench.gpu.cases.attention_batch import AttentionShape, Lengths
from ops.bench.gpu.tune.choice import Tuning, entries_of

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
# Most models have heads of 128, so that entry comes first: time may run out.
_SHAPES = {
    128: LLAMA_ATTENTION,
    64: replace(LLAMA_ATTENTION, name="heads of 64", head_dim=64),
    256: replace(LLAMA_ATTENTION, name="heads of 256", num_heads=16, head_dim=256),
}
_SPLIT_PROBLEMS: dict[str, Lengths] = {
    "64 x 8192": [(1, 8192)] * 64,
    "256 x 1024": [(1, 1024)] * 256,
    "8 x 1024": [(1, 1024)] * 8,
    "1 x 32768": [(1, 32_768)],
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
    shape: AttentionShape,
    lengths: dict[str, Lengths],
    cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> list[Check]:
    """Compare an entry's results with the reference in float32."""
    return [
        Check(name, partial(attention_error, device, shape, batch, cache_dtype=dtype, entry=entry), 1e-2)
        for name, batch in lengths.items()
        for dtype in cache_dtypes
    ]


def make_problems(
    shape: AttentionShape, lengths: dict[str, Lengths], case: Callable[..., Case] = attention_case
) -> tuple[CaseSpec, ...]:
    """Return the cases at which entries are timed."""
    return tuple(CaseSpec(name, partial(case, shape=shape, lengths=batch)) for name, batch in lengths.items())


def _tunings(
    table: str,
    blocks: str,
    launches: Callable[[int], Iterable[Sequence[int]]],
    programs: Sequence[int],
    checks: dict[str, Lengths],
    problems: dict[str, Lengths],
    cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> tuple[Tuning, ...]:
    """Return a tuning for each head size, of the launches for its tile, each tried with every number of programs."""
    names = f"{blocks} num_warps num_stages programs_per_multiprocessor"
    case = attention_case if cache_dtypes == (torch.bfloat16,) else eight_bit_case
    return tuple(
        Tuning(
            table,
            head_dim,
            entries_of(names, [(*launch, number) for launch in launches(8192 // head_dim) for number in programs]),
            partial(make_checks, shape=shape, lengths=checks, cache_dtypes=cache_dtypes),
            make_problems(shape, problems, case),
        )
        for head_dim, shape in _SHAPES.items()
    )


# Even numbers of stages compile to the code of the odd ones below them.
SPLIT_ATTENTION = _tunings(
    "SPLIT_ATTENTION",
    "block_n",
    lambda tile: (
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5),
        (2 * tile, 4, 3), (2 * tile, 8, 3), (2 * tile, 8, 5), (tile // 2, 4, 5), (tile // 2, 4, 7),
    ),
    (2, 4, 8),
    DECODES_CHECKED,
    _SPLIT_PROBLEMS,
)  # fmt: skip
# These keep converted tiles in registers.
SPLIT_ATTENTION_8BIT = _tunings(
    "SPLIT_ATTENTION_8BIT",
    "block_n",
    lambda tile: (
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5), (2 * tile, 8, 5),
        (tile // 2, 4, 3), (tile // 2, 4, 5), (tile // 2, 4, 7), (tile // 2, 8, 5),
    ),
    (2, 4, 8),
    DECODES_CHECKED,
    _SPLIT_PROBLEMS,
    EIGHT_BITS,
)  # fmt: skip
# None of these spills registers on Hopper: 64 rows of heads of 256 need more than four warps.
CHUNK_ATTENTION = _tunings(
    "CHUNK_ATTENTION",
    "block_m block_n",
    lambda tile: (
        (128, tile, 8, 2), (128, tile, 8, 3), (128, tile, 8, 5), (128, tile // 2, 8, 3), (128, tile // 2, 8, 5),
        (64, tile, 8, 3), (64, tile // 2, 4, 3), (64, tile // 2, 4, 5), *([(64, tile, 4, 3)] if tile > 32 else []),
    ),
    (1, 2, 4),
    CHUNKS_CHECKED,
    _CHUNK_PROBLEMS,
)  # fmt: skip
