"""Entries of the tables of the operations on rows between matrices: normalisation, SiLU, rotation, sampling."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from kernels.sampling import launch_table
from ops.bench.gpu.case import CaseSpec, Check, Entry
from ops.bench.gpu.cases.elementwise import rms_norm_case, rms_norm_error, silu_mul_case, silu_mul_error
from ops.bench.gpu.cases.logits import sampling_case, sampling_error
from ops.bench.gpu.cases.rotation import rotation_case, rotation_error
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_32B
from ops.bench.gpu.tune.choice import Tuning, checks_at, entries_of

_MODELS = (LLAMA3_8B, QWEN3_32B)
_ROWS = (1, 64, 8192)
_VOCAB_SIZE = 128_256
# Deviation of the logits, top_k, top_p.
_KINDS = {"plain": (1.0, 0, 1.0), "top-k top-p": (1.0, 50, 0.9), "top-p": (4.0, 0, 0.9), "flat top-p": (1.0, 0, 0.9)}
# They differ from the present entry of Hopper in one respect or two. None spills registers on Hopper.
_SAMPLING_VARIATIONS: tuple[Entry, ...] = (
    {"tile": 128}, {"tile": 512, "threshold_rows": 2},
    {"tiles": 8}, {"tiles": 32}, {"tiles": 32, "statistics_warps": 8}, {"statistics_warps": 8},
    {"threshold_rows": 2}, {"threshold_rows": 2, "stages": 2}, {"threshold_rows": 2, "stages": 6},
    {"stages": 2}, {"stages": 3},
    {"pivots": 2}, {"pivots": 8, "threshold_rows": 2}, {"draw_warps": 2}, {"draw_warps": 8},
)  # fmt: skip


def sampling_checks(device: torch.device, entry: Entry, num_rows: int, vocab_size: int) -> list[Check]:
    """Compare an entry's tokens with those of a full sort in float64."""
    # Where a token weighs a millionth of the sum, a rounding of the sum moves a draw to the next one.
    return [
        Check(
            name,
            partial(sampling_error, device, num_rows, vocab_size, *kind, may_truncate=name != "plain", entry=entry),
            0.05,
        )
        for name, kind in _KINDS.items()
    ]


def sampling_problems(num_rows: int, vocab_size: int) -> tuple[CaseSpec, ...]:
    """Return a case for each kind of logits and truncation."""
    return tuple(
        CaseSpec(
            f"{num_rows}x{vocab_size} {name}",
            partial(
                sampling_case, num_rows=num_rows, vocab_size=vocab_size, deviation=deviation, top_k=top_k, top_p=top_p
            ),
        )
        for name, (deviation, top_k, top_p) in _KINDS.items()
    )


RMS_NORM = (
    Tuning(
        "RMS_NORM",
        None,
        entries_of("elements_per_thread max_warps min_elements", product((8, 16, 32), (8, 16, 32), (1024, 4096))),
        checks_at(rms_norm_error, ((1, 4096), (7, 1023), (65, 5120))),
        tuple(
            CaseSpec(f"{rows}x{model.hidden_size}", partial(rms_norm_case, num_rows=rows, size=model.hidden_size))
            for model, rows in product(_MODELS, _ROWS)
        ),
    ),
)
SILU_MUL = (
    Tuning(
        "SILU_MUL",
        None,
        entries_of("block num_warps", product((512, 1024, 2048, 4096), (2, 4, 8))),
        checks_at(silu_mul_error, ((1, 14_336), (7, 1023), (65, 3072))),
        tuple(
            CaseSpec(
                f"{rows}x{model.intermediate_size}",
                partial(silu_mul_case, num_rows=rows, size=model.intermediate_size),
            )
            for model, rows in product(_MODELS, _ROWS)
        ),
    ),
)
ROPE_KV_WRITE = (
    Tuning(
        "ROPE_KV_WRITE",
        None,
        entries_of("block_heads num_warps", product((4, 8, 16, 32, 64), (2, 4, 8))),
        checks_at(rotation_error, tuple((model, 65) for model in _MODELS)),
        tuple(
            CaseSpec(f"{model.name} {rows}", partial(rotation_case, model=model, num_tokens=rows))
            for model, rows in product(_MODELS, _ROWS)
        ),
    ),
)
SAMPLING = (
    Tuning(
        "SAMPLING",
        None,
        tuple({**launch_table.SAMPLING["HOPPER"], **variation} for variation in _SAMPLING_VARIATIONS),
        partial(sampling_checks, num_rows=96, vocab_size=_VOCAB_SIZE),
        sampling_problems(128, _VOCAB_SIZE) + sampling_problems(8, _VOCAB_SIZE),
    ),
)
