"""The launch tables that are tuned: candidates near the reasoned entries, and the shapes that decide.

Also up to how many rows our kernels for linear layers are ahead of other ways to multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from kernels.gpu_config import GpuGeneration, Rows, by_generation, entry_of
from kernels.linear.gpu_packed import PackedMatrix
from kernels.linear.gpu_packed import matrix as packed
from kernels.linear.gpu_scaled import ScaledMatrix
from kernels.linear.gpu_scaled import matrix as scaled
from kernels.paged_attention import triton_config as attention
from kernels.sampling.config import sampling_config
from ops.bench.gpu.case import Entry, Op, Shapes, sets_for, sizes
from ops.bench.gpu.cases import quantized_linear
from ops.bench.gpu.cases.attention import (
    ATTENTION_OP,
    CHUNKS_CHECKED,
    DECODES_CHECKED,
    EIGHT_BIT_OP,
    EIGHT_BITS,
    LLAMA_ATTENTION,
)
from ops.bench.gpu.cases.attention_batch import Lengths
from ops.bench.gpu.cases.elementwise import RMS_NORM_OP, ROPE_KV_WRITE_OP, SILU_MUL_OP
from ops.bench.gpu.cases.logits import KINDS, SAMPLING_OP
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_32B
from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune.choice import Tuning

Entries = Mapping[int, Entry]
_MODELS = (LLAMA3_8B, QWEN3_32B)
_ROWS = (1, 64, 8192)
_VOCAB_SIZE = 128_256
# A kernel is ahead of another way to compute the same when it is faster by more than measurements differ.
_LEAST_LEAD = 0.02


def _present(table: Mapping[str, Rows], fields: str, key: int, generation: GpuGeneration) -> Entry:
    """Return the entry of a table that serves a key; the largest one serves larger keys."""
    rows = by_generation(table)[generation]
    return entry_of(fields, rows.get(key, rows[max(rows)]))


def _tuning(
    name: str,
    table: Mapping[str, Rows],
    fields: str,
    key: int,
    rows: Iterable[tuple[int, ...]],
    *decided_by: *tuple[Op, Shapes, Shapes],
) -> Tuning:
    present = partial(_present, table, fields, key)
    return Tuning(name, key, present, tuple(entry_of(fields, row) for row in rows), *decided_by)


def _attention_tunings(
    name: str,
    table: Mapping[str, Rows],
    op: Op,
    launches: Callable[[int], Iterable[tuple[int, ...]]],
    cache_dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    is_chunked: bool = False,
) -> tuple[Tuning, ...]:
    """Return the entries of all head sizes; `launches` are of a tile, and each is tried with several `programs`."""
    fields, programs = (attention.CHUNK_FIELDS, (1, 2, 4)) if is_chunked else (attention.SPLIT_FIELDS, (2, 4, 8))
    checked = CHUNKS_CHECKED if is_chunked else DECODES_CHECKED
    timed = _CHUNK_PROBLEMS if is_chunked else _SPLIT_PROBLEMS
    return tuple(
        _tuning(
            name,
            table,
            fields,
            head_dim,
            [(*launch, count) for launch in launches(8192 // head_dim) for count in programs],
            op,
            {f"{label} {dtype}": (shape, batch, dtype) for label, batch in checked.items() for dtype in cache_dtypes},
            {label: (shape, batch) for label, batch in timed.items()},
        )
        for head_dim, shape in _ATTENTION_SHAPES.items()
    )


# Most models have heads of 128, so that entry comes first: time may run out.
_ATTENTION_SHAPES = {
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
# Even numbers of stages compile to the code of the odd ones below them.
SPLIT_ATTENTION = _attention_tunings(
    "SPLIT_ATTENTION",
    attention.SPLIT_ATTENTION,
    ATTENTION_OP,
    lambda tile: (
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5),
        (2 * tile, 4, 3), (2 * tile, 8, 3), (2 * tile, 8, 5), (tile // 2, 4, 5), (tile // 2, 4, 7),
    ),
)  # fmt: skip
# These keep converted tiles in registers.
SPLIT_ATTENTION_8BIT = _attention_tunings(
    "SPLIT_ATTENTION_8BIT",
    attention.SPLIT_ATTENTION_8BIT,
    EIGHT_BIT_OP,
    lambda tile: (
        (tile, 4, 3), (tile, 4, 5), (tile, 4, 7), (tile, 8, 3), (tile, 8, 5), (2 * tile, 8, 5),
        (tile // 2, 4, 3), (tile // 2, 4, 5), (tile // 2, 4, 7), (tile // 2, 8, 5),
    ),
    EIGHT_BITS,
)  # fmt: skip
# None of these spills registers on Hopper: 64 rows of heads of 256 need more than four warps.
CHUNK_ATTENTION = _attention_tunings(
    "CHUNK_ATTENTION",
    attention.CHUNK_ATTENTION,
    ATTENTION_OP,
    lambda tile: (
        (128, tile, 8, 2), (128, tile, 8, 3), (128, tile, 8, 5), (128, tile // 2, 8, 3), (128, tile // 2, 8, 5),
        (64, tile, 8, 3), (64, tile // 2, 4, 3), (64, tile // 2, 4, 5), *([(64, tile, 4, 3)] if tile > 32 else []),
    ),
    is_chunked=True,
)  # fmt: skip


def _linear_tunings(
    name: str,
    table: Mapping[str, Rows],
    fields: str,
    make_weight: quantized_linear.MakeWeight,
    candidates: Iterable[tuple[int, ...]],
) -> tuple[Tuning, ...]:
    """Return the entries for up to 16, 32, 64 and 128 rows."""
    op = quantized_linear.linear_op(make_weight)
    return tuple(
        _tuning(
            name,
            table,
            fields,
            limit,
            candidates,
            replace(op, error=partial(op.error, max_rows=limit)),
            sizes((limit, 4096, 4096), (limit - 1, 6144, 1040), (3, 131, 208)),
            {label: (limit, *product) for label, product in LLAMA3_8B.projections.items()},
        )
        for limit in (16, 32, 64, 128)
    )


PACKED_LINEAR = _linear_tunings(
    "PACKED_LINEAR",
    packed.PACKED_LINEAR,
    packed.FIELDS,
    quantized_linear.int4_weight,
    (
        (64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 4, 4), (64, 4, 6, 2), (64, 8, 4, 2),
        (128, 4, 3, 2), (128, 4, 4, 1), (128, 4, 4, 2), (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 4, 1),
        (256, 8, 3, 1),
    ),
)  # fmt: skip
SCALED_LINEAR = _linear_tunings(
    "SCALED_LINEAR",
    scaled.SCALED_LINEAR,
    scaled.FIELDS,
    quantized_linear.fp8_weight,
    (
        (64, 128, 4, 4, 2), (64, 128, 4, 6, 2), (64, 128, 4, 8, 1), (64, 128, 4, 4, 4),
        (64, 256, 4, 3, 2), (64, 256, 4, 4, 2), (64, 256, 4, 5, 2), (64, 256, 4, 6, 1),
        (128, 128, 4, 3, 2), (128, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 256, 8, 3, 1),
    ),
)  # fmt: skip


def quantized_ahead_until(
    device: torch.device,
    timer: Timer,
    entries: Entries,
    make_weight: quantized_linear.MakeWeight,
    other: Callable[..., torch.Tensor],
    size: tuple[int, int] = (6144, 4096),
    limits: Iterable[int] = (16, 64, 128, 256, 512, 1024),
) -> int:
    """Return the largest of `limits`, ascending rows, up to which our kernel is ahead of another; 0 at none."""
    num_sets = sets_for(size[0] * size[1] // 2)
    matrices = [quantized_linear.on_device(make_weight(device, *size)) for _ in range(num_sets)]
    last = 0
    for num_rows in limits:
        x = quantized_linear.random_inputs(device, num_rows, size[1])
        max_rows = next((limit for limit in sorted(entries) if num_rows <= limit), max(entries))
        calls = (
            lambda index, x=x, rows=max_rows: quantized_linear.multiply(x, matrices[index], entries[rows], rows),
            lambda index, x=x: other(x, matrices[index]),
        )
        ours, theirs = (timer.measure(call, num_sets).seconds for call in calls)
        if ours * (1 + _LEAST_LEAD) >= theirs:
            break
        last = num_rows
    return last


def fused_rows(device: torch.device, timer: Timer, entries: Entries) -> dict[str, int]:
    """Return up to how many rows unpacking 4-bit weights in the product is ahead of writing them out first."""
    from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton

    def written(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        return F.linear(x, dequantize_triton(matrix, x.dtype))

    return {"FUSED_ROWS": quantized_ahead_until(device, timer, entries, quantized_linear.int4_weight, written)}


def kernel_rows(device: torch.device, timer: Timer, entries: Entries) -> dict[str, int]:
    """Return up to how many rows our kernel is ahead of cuBLAS in float8, inputs quantized first by either."""
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    def cublas(x: torch.Tensor, matrix: ScaledMatrix) -> torch.Tensor:
        rows, of_features = quantize_tokens_triton(x, matrix.rounding), matrix.scales[None, :]
        weight = matrix.values.t()
        return torch._scaled_mm(rows.values, weight, scale_a=rows.scales, scale_b=of_features, out_dtype=x.dtype)

    return {"KERNEL_ROWS": quantized_ahead_until(device, timer, entries, quantized_linear.fp8_weight, cublas)}


def _constant_tuning(
    name: str, present: Entry, values: Iterable[tuple[int, ...]], *decided_by: *tuple[Op, Shapes, Shapes]
) -> Tuning:
    """Return the tuning of a constant beside a kernel, the same for all generations."""
    candidates = tuple(entry_of(" ".join(present), row) for row in values)
    return Tuning(name, None, lambda generation: present, candidates, *decided_by)


RMS_NORM = _constant_tuning(
    "RMS_NORM",
    {"elements_per_thread": 16, "max_warps": 16, "min_elements": 1024},
    product((8, 16, 32), (8, 16, 32), (1024, 4096)),
    RMS_NORM_OP,
    sizes((1, 4096), (7, 1023), (65, 5120)),
    sizes(*((rows, model.hidden_size) for model, rows in product(_MODELS, _ROWS))),
)
SILU_MUL = _constant_tuning(
    "SILU_MUL",
    {"block": 1024, "num_warps": 4},
    product((512, 1024, 2048, 4096), (2, 4, 8)),
    SILU_MUL_OP,
    sizes((1, 14_336), (7, 1023), (65, 3072)),
    sizes(*((rows, model.intermediate_size) for model, rows in product(_MODELS, _ROWS))),
)
ROPE_KV_WRITE = _constant_tuning(
    "ROPE_KV_WRITE",
    {"block_heads": 16, "num_warps": 4},
    product((4, 8, 16, 32, 64), (2, 4, 8)),
    ROPE_KV_WRITE_OP,
    {model.name: (model, 65) for model in _MODELS},
    {f"{model.name} {rows}": (model, rows) for model, rows in product(_MODELS, _ROWS)},
)


def _sampling(generation: GpuGeneration) -> Entry:
    return asdict(sampling_config(generation))


# They differ from the present entry of Hopper in one respect or two. None spills registers on Hopper.
_SAMPLING_VARIATIONS: tuple[Entry, ...] = (
    {"tile": 128}, {"tile": 512, "threshold_rows": 2},
    {"tiles": 8}, {"tiles": 32}, {"tiles": 32, "statistics_warps": 8}, {"statistics_warps": 8},
    {"threshold_rows": 2}, {"threshold_rows": 2, "stages": 2}, {"threshold_rows": 2, "stages": 6},
    {"stages": 2}, {"stages": 3},
    {"pivots": 2}, {"pivots": 8, "threshold_rows": 2}, {"draw_warps": 2}, {"draw_warps": 8},
)  # fmt: skip
SAMPLING = Tuning(
    "SAMPLING",
    None,
    _sampling,
    tuple({**_sampling(GpuGeneration.HOPPER), **variation} for variation in _SAMPLING_VARIATIONS),
    SAMPLING_OP,
    # An entry is checked as it is timed: without truncation there is less to launch.
    {name: (96, _VOCAB_SIZE, *kind, 0.0, name != "plain") for name, kind in KINDS.items()},
    {f"{rows}x{_VOCAB_SIZE} {name}": (rows, _VOCAB_SIZE, *kind) for rows in (128, 8) for name, kind in KINDS.items()},
)
