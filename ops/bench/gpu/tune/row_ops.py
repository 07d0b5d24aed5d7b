"""Entries of the tables of the operations on rows between matrices: normalisation, SiLU, rotation, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import product

from kernels.gpu_config import GpuGeneration, entry_of
from kernels.sampling.config import sampling_config
from ops.bench.gpu.case import Entry, sizes
from ops.bench.gpu.cases.elementwise import RMS_NORM_OP, ROPE_KV_WRITE_OP, SILU_MUL_OP
from ops.bench.gpu.cases.logits import KINDS, SAMPLING_OP
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_32B
from ops.bench.gpu.tune.choice import Tuning

_MODELS = (LLAMA3_8B, QWEN3_32B)
_ROWS = (1, 64, 8192)
_VOCAB_SIZE = 128_256
# They differ from the present entry of Hopper in one respect or two. None spills registers on Hopper.
_SAMPLING_VARIATIONS: tuple[Entry, ...] = (
    {"tile": 128}, {"tile": 512, "threshold_rows": 2},
    {"tiles": 8}, {"tiles": 32}, {"tiles": 32, "statistics_warps": 8}, {"statistics_warps": 8},
    {"threshold_rows": 2}, {"threshold_rows": 2, "stages": 2}, {"threshold_rows": 2, "stages": 6},
    {"stages": 2}, {"stages": 3},
    {"pivots": 2}, {"pivots": 8, "threshold_rows": 2}, {"draw_warps": 2}, {"draw_warps": 8},
)  # fmt: skip

# Of sampling, an entry is checked as it is timed: without truncation there is less to launch.
_CHECKED = {name: (96, _VOCAB_SIZE, *kind, 0.0, name != "plain") for name, kind in KINDS.items()}
_TIMED = {
    f"{rows}x{_VOCAB_SIZE} {name}": (rows, _VOCAB_SIZE, *kind) for rows in (128, 8) for name, kind in KINDS.items()
}


def _always(**present: int) -> Callable[[GpuGeneration], Entry]:
    return lambda generation: present


def _sampling(generation: GpuGeneration) -> Entry:
    return asdict(sampling_config(generation))


def _entries(names: str, values: Iterable[tuple[int, ...]]) -> tuple[Entry, ...]:
    return tuple(entry_of(names, row) for row in values)


RMS_NORM = Tuning(
    "RMS_NORM",
    None,
    _always(elements_per_thread=16, max_warps=16, min_elements=1024),
    _entries("elements_per_thread max_warps min_elements", product((8, 16, 32), (8, 16, 32), (1024, 4096))),
    RMS_NORM_OP,
    sizes((1, 4096), (7, 1023), (65, 5120)),
    sizes(*((rows, model.hidden_size) for model, rows in product(_MODELS, _ROWS))),
)
SILU_MUL = Tuning(
    "SILU_MUL",
    None,
    _always(block=1024, num_warps=4),
    _entries("block num_warps", product((512, 1024, 2048, 4096), (2, 4, 8))),
    SILU_MUL_OP,
    sizes((1, 14_336), (7, 1023), (65, 3072)),
    sizes(*((rows, model.intermediate_size) for model, rows in product(_MODELS, _ROWS))),
)
ROPE_KV_WRITE = Tuning(
    "ROPE_KV_WRITE",
    None,
    _always(block_heads=16, num_warps=4),
    _entries("block_heads num_warps", product((4, 8, 16, 32, 64), (2, 4, 8))),
    ROPE_KV_WRITE_OP,
    {model.name: (model, 65) for model in _MODELS},
    {f"{model.name} {rows}": (model, rows) for model, rows in product(_MODELS, _ROWS)},
)
SAMPLING = Tuning(
    "SAMPLING",
    None,
    _sampling,
    tuple({**_sampling(GpuGeneration.HOPPER), **variation} for variation in _SAMPLING_VARIATIONS),
    SAMPLING_OP,
    _CHECKED,
    _TIMED,
)
