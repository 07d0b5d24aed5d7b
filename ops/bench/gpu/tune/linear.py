"""Entries of the tables of linear layers, and up to how many rows our kernels are ahead of other ways to multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from kernels.gpu_config import Rows, entry_of
from kernels.linear.gpu_packed import PackedMatrix
from kernels.linear.gpu_packed import matrix as packed_tables
from kernels.linear.gpu_scaled import ScaledMatrix
from kernels.linear.gpu_scaled import matrix as scaled_tables
from ops.bench.gpu.case import Candidate, Entry, Op, sets_for, sizes
from ops.bench.gpu.cases.quantized_linear import (
    MakeWeight,
    fp8_weight,
    int4_weight,
    linear_op,
    multiply,
    on_device,
    random_inputs,
)
from ops.bench.gpu.shapes import LLAMA3_8B
from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune.choice import Tuning, ahead_until, present_entry

_LIMITS = (16, 64, 128, 256, 512, 1024)
_LIMIT_PRODUCT = (6144, 4096)
Product = tuple[int, int]
Entries = Mapping[int, Entry]


def quantized_ahead_until(
    device: torch.device,
    timer: Timer,
    entries: Entries,
    weight: MakeWeight,
    other: Callable[..., torch.Tensor],
    product: Product = _LIMIT_PRODUCT,
    limits: Iterable[int] = _LIMITS,
) -> int:
    """Return up to how many rows of `limits` our kernel is ahead of another way to multiply by the same matrices."""
    num_sets = sets_for(product[0] * product[1] // 2)
    matrices = [on_device(weight(device, *product)) for _ in range(num_sets)]

    def calls(num_rows: int) -> tuple[Candidate, Candidate]:
        x, max_rows = random_inputs(device, num_rows, product[1]), _limit_of(entries, num_rows)
        return (
            lambda index: multiply(x, matrices[index], entries[max_rows], max_rows),
            lambda index: other(x, matrices[index]),
        )

    return ahead_until(timer, num_sets, limits, calls)


def _limit_of(entries: Entries, num_rows: int) -> int:
    return next((limit for limit in sorted(entries) if num_rows <= limit), max(entries))


def fused_rows(device: torch.device, timer: Timer, entries: Entries) -> dict[str, int]:
    """Return up to how many rows unpacking 4-bit weights in the product is ahead of writing them out first."""
    from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton

    def written(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        return F.linear(x, dequantize_triton(matrix, x.dtype))

    return {"FUSED_ROWS": quantized_ahead_until(device, timer, entries, int4_weight, written)}


def kernel_rows(device: torch.device, timer: Timer, entries: Entries) -> dict[str, int]:
    """Return up to how many rows our kernel is ahead of cuBLAS in float8, inputs quantized first by either."""
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    def cublas(x: torch.Tensor, matrix: ScaledMatrix) -> torch.Tensor:
        rows, of_features = quantize_tokens_triton(x, matrix.rounding), matrix.scales[None, :]
        weight = matrix.values.t()
        return torch._scaled_mm(rows.values, weight, scale_a=rows.scales, scale_b=of_features, out_dtype=x.dtype)

    return {"KERNEL_ROWS": quantized_ahead_until(device, timer, entries, fp8_weight, cublas)}


def _tunings(
    name: str,
    table: Mapping[str, Rows],
    fields: str,
    limits: Iterable[int],
    candidates: Iterable[tuple[int, ...]],
    op: Op,
    odd_sizes: tuple[Product, Product],
) -> tuple[Tuning, ...]:
    many, few = odd_sizes
    return tuple(
        Tuning(
            name,
            limit,
            partial(present_entry, fields, table, limit),
            tuple(entry_of(fields, row) for row in candidates),
            replace(op, error=partial(op.error, max_rows=limit)),
            sizes((limit, 4096, 4096), (limit - 1, *many), (3, *few)),
            {label: (limit, *product) for label, product in LLAMA3_8B.projections.items()},
        )
        for limit in limits
    )


PACKED_LINEAR = _tunings(
    "PACKED_LINEAR",
    packed_tables.PACKED_LINEAR,
    packed_tables.FIELDS,
    (16, 32, 64, 128),
    (
        (64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 4, 4), (64, 4, 6, 2), (64, 8, 4, 2),
        (128, 4, 3, 2), (128, 4, 4, 1), (128, 4, 4, 2), (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 4, 1),
        (256, 8, 3, 1),
    ),
    linear_op(int4_weight),
    ((6144, 1040), (131, 208)),
)  # fmt: skip
SCALED_LINEAR = _tunings(
    "SCALED_LINEAR",
    scaled_tables.SCALED_LINEAR,
    scaled_tables.FIELDS,
    (16, 32, 64, 128),
    (
        (64, 128, 4, 4, 2), (64, 128, 4, 6, 2), (64, 128, 4, 8, 1), (64, 128, 4, 4, 4),
        (64, 256, 4, 3, 2), (64, 256, 4, 4, 2), (64, 256, 4, 5, 2), (64, 256, 4, 6, 1),
        (128, 128, 4, 3, 2), (128, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 256, 8, 3, 1),
    ),
    linear_op(fp8_weight),
    ((6144, 1040), (131, 208)),
)  # fmt: skip
