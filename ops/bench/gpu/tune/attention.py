"""Entries of the tables of paged attention: for each head size, launches near the reasoned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.gpu_config import Rows, entry_of
from kernels.paged_attention import triton_config as tables
from ops.bench.gpu.case import Op
from ops.bench.gpu.cases.attention import (
    ATTENTION_OP,
    CHUNKS_CHECKED,
    DECODES_CHECKED,
    EIGHT_BIT_OP,
    EIGHT_BITS,
    LLAMA_ATTENTION,
)
from ops.bench.gpu.cases.attention_batch import Lengths
from ops.bench.gpu.tune.choice import Tuning, present_entry

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


def _tunings(
    name: str,
    table: Mapping[str, Rows],
    fields: str,
    op: Op,
    launches: Callable[[int], Iterable[tuple[int, ...]]],
    programs: Sequence[int],
    checked: Mapping[str, Lengths],
    timed: Mapping[str, Lengths],
    cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> tuple[Tuning, ...]:
    return tuple(
        Tuning(
            name,
            head_dim,
            partial(present_entry, fields, table, head_dim),
            tuple(entry_of(fields, (*launch, n)) for launch in launches(8192 // head_dim) for n in programs),
            op,
            {f"{label} {dtype}": (shape, batch, dtype) for label, batch in checked.items() for dtype in cache_dtypes},
            {label: (shape, batch) for label, batch in timed.items()},
        )
        for head_dim, shape in _SHAPES.items()
    )


# Even numbers of stages compile to the code of the odd ones below them.
SPLIT_ATTENTION = _tunings(
    "SPLIT_ATTENTION",
    tables.SPLIT_ATTENTION,
    tables.SPLIT_FIELDS,
    ATTENTION_OP,
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
    tables.SPLIT_ATTENTION_8BIT,
    tables.SPLIT_FIELDS,
    EIGHT_BIT_OP,
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
    tables.CHUNK_ATTENTION,
    tables.CHUNK_FIELDS,
    ATTENTION_OP,
    lambda tile: (
        (128, tile, 8, 2), (128, tile, 8, 3), (128, tile, 8, 5), (128, tile // 2, 8, 3), (128, tile // 2, 8, 5),
        (64, tile, 8, 3), (64, tile // 2, 4, 3), (64, tile // 2, 4, 5), *([(64, tile, 4, 3)] if tile > 32 else []),
    ),
    (1, 2, 4),
    CHUNKS_CHECKED,
    _CHUNK_PROBLEMS,
)  # fmt: skip
