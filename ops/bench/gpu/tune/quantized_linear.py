"""Entries of the tables of linear layers on quantized weights, and up to how many rows their kernels are ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.gpu_packed import PackedMatrix
from kernels.linear.gpu_packed.config import PackedLinearConfig
from kernels.linear.gpu_scaled import ScaledMatrix
from kernels.linear.product_launch import ProductLaunch
from ops.bench.gpu.case import Check, sets_for
from ops.bench.gpu.cases.quantized_linear import (
    Matrix,
    fp8_error,
    int4_error,
    multiply,
    random_fp8,
    random_inputs,
    random_int4,
)
from ops.bench.gpu.shapes import LLAMA3_8B
from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune.choice import Entry, Problem, Tuning

_LIMITS = (16, 64, 128, 256, 512, 1024)
_LIMIT_PRODUCT = (6144, 4096)
# Ahead by more than measurements differ.
_LEAST_GAIN = 0.02
Product = tuple[int, int]
Multiply = Callable[..., torch.Tensor]


def multiply_int4(x: torch.Tensor, matrix: Matrix, max_rows: int, entry: Entry) -> torch.Tensor:
    """Launch our kernel by an entry for up to `max_rows` rows; where there is no GPU, run the dispatched op."""
    if not isinstance(matrix, PackedMatrix):
        return multiply(x, matrix)
    from kernels.linear.gpu_packed.triton_product import packed_linear_triton

    config = PackedLinearConfig(max_rows, **entry)
    return packed_linear_triton(x, matrix, None, x.dtype, gpu_of(x.device), config)


def multiply_fp8(x: torch.Tensor, matrix: Matrix, max_rows: int, entry: Entry) -> torch.Tensor:
    """Do the same for float8, inputs quantized first."""
    if not isinstance(matrix, ScaledMatrix):
        return multiply(x, matrix)
    from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton
    from kernels.linear.gpu_scaled.triton_tokens import quantize_tokens_triton

    values, scales = quantize_tokens_triton(x, matrix.values.dtype)
    launch = ProductLaunch(max_rows, **entry)
    return scaled_linear_triton(values, scales, matrix, None, x.dtype, gpu_of(x.device), launch)


def make_checks(
    device: torch.device,
    entry: Entry,
    error: Callable[..., float],
    multiply: Multiply,
    max_rows: int,
    shapes: Iterable[tuple[int, int, int]],
) -> list[Check]:
    """Compare with float64, at shapes of (rows, out_features, in_features)."""
    by_entry = partial(multiply, max_rows=max_rows, entry=entry)
    return [Check("x".join(map(str, shape)), partial(error, device, *shape, by_entry), 4e-3) for shape in shapes]


def make_problems(
    device: torch.device,
    make: Callable[..., object],
    multiply: Multiply,
    max_rows: int,
    products: Mapping[str, Product],
) -> list[Problem]:
    """Make matrices, so many that none is found in the L2 cache."""

    def problem(name: str, out_features: int, in_features: int) -> Problem:
        x = random_inputs(device, max_rows, in_features)
        num_sets = sets_for(out_features * in_features // 2)
        matrices = [make(device, out_features, in_features) for _ in range(num_sets)]
        return Problem(
            f"{name} {max_rows} rows",
            num_sets,
            lambda entry: lambda index: multiply(x, matrices[index], max_rows, entry),
        )

    return [problem(name, *product) for name, product in products.items()]


def ahead_until(
    device: torch.device,
    timer: Timer,
    make: Callable[..., object],
    ours: Multiply,
    theirs: Multiply,
    product: Product = _LIMIT_PRODUCT,
    limits: Iterable[int] = _LIMITS,
) -> int:
    """Return the largest of `limits` up to which our kernel is ahead of the other way to multiply, 0 at none."""
    num_sets = sets_for(product[0] * product[1] // 2)
    matrices = [make(device, *product) for _ in range(num_sets)]
    last = 0
    for num_rows in limits:
        x = random_inputs(device, num_rows, product[1])

        def seconds(multiply: Multiply, x: torch.Tensor = x) -> float:
            return timer.measure(lambda index: multiply(x, matrices[index]), num_sets).seconds

        if seconds(ours) * (1 + _LEAST_GAIN) >= seconds(theirs):
            break
        last = num_rows
    return last


def fused_rows(device: torch.device, timer: Timer, entries: Mapping[int, Entry]) -> dict[str, int]:
    """Return up to how many rows unpacking 4-bit weights in the product is ahead of writing them out first."""
    from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton

    def written(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        return F.linear(x, dequantize_triton(matrix, x.dtype))

    ours = partial(_by_table, multiply=multiply_int4, entries=entries)
    return {"FUSED_ROWS": ahead_until(device, timer, random_int4, ours, written)}


def kernel_rows(device: torch.device, timer: Timer, entries: Mapping[int, Entry]) -> dict[str, int]:
    """Return up to how many rows our kernel is ahead of cuBLAS in float8, inputs quantized first by either."""
    from kernels.linear.gpu_scaled.triton_tokens import quantize_tokens_triton

    def cublas(x: torch.Tensor, matrix: ScaledMatrix) -> torch.Tensor:
        values, scales = quantize_tokens_triton(x, matrix.values.dtype)
        of_features = matrix.scales[None, :]
        return torch._scaled_mm(values, matrix.values.t(), scale_a=scales, scale_b=of_features, out_dtype=x.dtype)

    ours = partial(_by_table, multiply=multiply_fp8, entries=entries)
    return {"KERNEL_ROWS": ahead_until(device, timer, random_fp8, ours, cublas)}


def _by_table(x: torch.Tensor, matrix: object, multiply: Multiply, entries: Mapping[int, Entry]) -> torch.Tensor:
    max_rows = next((limit for limit in sorted(entries) if len(x) <= limit), max(entries))
    return multiply(x, matrix, max_rows, entries[max_rows])


def _tunings(
    table: str,
    rows: Iterable[int],
    candidates: tuple[Entry, ...],
    error: Callable[..., float],
    make: Callable[..., object],
    multiply: Multiply,
) -> tuple[Tuning, ...]:
    return tuple(
        Tuning(
            table,
            max_rows,
            candidates,
            partial(
                make_checks,
                error=error,
                multiply=multiply,
                max_rows=max_rows,
                shapes=((max_rows, 4096, 4096), (max_rows - 1, 6144, 1040), (3, 131, 208)),
            ),
            partial(make_problems, make=make, multiply=multiply, max_rows=max_rows, products=LLAMA3_8B.projections),
        )
        for max_rows in rows
    )


PACKED_LINEAR = _tunings(
    "PACKED_LINEAR",
    (16, 32, 64, 128),
    tuple(
        {"block_n": n, "num_warps": warps, "num_stages": stages, "programs_per_multiprocessor": programs}
        for n, warps, stages, programs in (
            (64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 4, 4), (64, 4, 6, 2), (64, 8, 4, 2),
            (128, 4, 3, 2), (128, 4, 4, 1), (128, 4, 4, 2), (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 4, 1),
            (256, 8, 3, 1),
        )
    ),
    int4_error,
    random_int4,
    multiply_int4,
)  # fmt: skip
SCALED_LINEAR = _tunings(
    "SCALED_LINEAR",
    (16, 32, 64, 128),
    tuple(
        {"block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "programs_per_multiprocessor": programs}
        for n, k, warps, stages, programs in (
            (64, 128, 4, 4, 2), (64, 128, 4, 6, 2), (64, 128, 4, 8, 1), (64, 128, 4, 4, 4),
            (64, 256, 4, 3, 2), (64, 256, 4, 4, 2), (64, 256, 4, 5, 2), (64, 256, 4, 6, 1),
            (128, 128, 4, 3, 2), (128, 128, 4, 4, 1), (128, 128, 8, 4, 1), (128, 256, 8, 3, 1),
        )
    ),
    fp8_error,
    random_fp8,
    multiply_fp8,
)  # fmt: skip
