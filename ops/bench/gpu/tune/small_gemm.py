"""Entries of the table of the small-batch linear layer, and the products for which it is ahead of cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.dense.small_gemm import SmallGemmWorkspace, small_gemm
from kernels.linear.product_launch import ProductLaunch
from ops.bench.gpu.case import Check, sets_for
from ops.bench.gpu.cases.small_gemm import Multiply, product_error
from ops.bench.gpu.shapes import LLAMA3_8B, MODELS
from ops.bench.gpu.timer import Timer
from ops.bench.gpu.tune.choice import Entry, Problem, Tuning

_TOLERANCE = 4e-3
_PREFERRED_ROWS = (1, 2, 4, 8, 16, 32, 64)
# Ahead by more than measurements differ.
_LEAST_GAIN = 0.02
Product = tuple[int, int]


def multiply_by(device: torch.device, max_rows: int, entry: Entry) -> Multiply:
    """Return our kernel launched by the entry for up to `max_rows` rows; without a GPU, the dispatched op."""
    workspace = SmallGemmWorkspace(device)
    if device.type != "cuda":
        return lambda inputs, weight: small_gemm(inputs, weight, workspace)
    from kernels.linear.dense.small_gemm.triton_kernel import small_gemm_triton

    gpu, launch = gpu_of(device), ProductLaunch(max_rows, **entry)
    return lambda inputs, weight: small_gemm_triton(inputs, weight, workspace, gpu, launch)


def make_checks(
    device: torch.device, entry: Entry, max_rows: int, shapes: Iterable[tuple[int, int, int]]
) -> list[Check]:
    """Compare with float64, at shapes of (rows, out_features, in_features)."""
    multiply = multiply_by(device, max_rows, entry)
    return [
        Check("x".join(map(str, shape)), partial(product_error, device, *shape, multiply), _TOLERANCE)
        for shape in shapes
    ]


def make_problems(device: torch.device, max_rows: int, products: Mapping[str, Product]) -> list[Problem]:
    """Make weights, so many that none is found in the L2 cache."""

    def problem(name: str, out_features: int, in_features: int) -> Problem:
        inputs, weights = _operands(device, max_rows, out_features, in_features)

        def call(entry: Entry) -> Callable[[int], object]:
            multiply = multiply_by(device, max_rows, entry)
            return lambda index: multiply(inputs, weights[index])

        return Problem(f"{name} {max_rows} rows", len(weights), call)

    return [problem(name, *product) for name, product in products.items()]


def preferred_products(
    device: torch.device,
    timer: Timer,
    entries: Mapping[int, Entry],
    products: Iterable[Product],
    rows: tuple[int, ...] = _PREFERRED_ROWS,
) -> dict[Product, int]:
    """Return for each product the largest number of rows up to which our kernel is ahead of cuBLAS, if at any.

    Args:
        device: To measure on.
        timer: To measure with.
        entries: Of the table, by the rows up to which they serve.
        products: As (out_features, in_features).
        rows: Numbers to measure, ascending.
    """
    preferred = {}
    for product in sorted(set(products)):
        for num_rows in rows:
            max_rows = next(limit for limit in sorted(entries) if num_rows <= limit)
            multiply = multiply_by(device, max_rows, entries[max_rows])
            if not _is_ahead(multiply, timer, *_operands(device, num_rows, *product)):
                break
            preferred[product] = num_rows
    return preferred


def _is_ahead(multiply: Multiply, timer: Timer, inputs: torch.Tensor, weights: torch.Tensor) -> bool:
    ours = timer.measure(lambda index: multiply(inputs, weights[index]), len(weights)).seconds
    cublas = timer.measure(lambda index: F.linear(inputs, weights[index]), len(weights)).seconds
    return ours * (1 + _LEAST_GAIN) < cublas


def _operands(
    device: torch.device, num_rows: int, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_sets = sets_for(2 * out_features * in_features)
    weights = torch.randn(num_sets, out_features, in_features, device=device, dtype=torch.bfloat16)
    return torch.randn(num_rows, in_features, device=device, dtype=torch.bfloat16), weights


_CANDIDATES: tuple[Entry, ...] = tuple(
    {"block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "programs_per_multiprocessor": programs}
    for n, k, warps, stages, programs in (
        (64, 128, 4, 3, 2), (64, 128, 4, 4, 2), (64, 128, 4, 5, 2), (64, 128, 4, 3, 3), (64, 128, 4, 4, 1),
        (64, 64, 4, 4, 2), (64, 64, 4, 6, 2), (64, 64, 4, 6, 4), (64, 64, 4, 8, 2),
        (64, 256, 4, 3, 1), (64, 256, 4, 3, 2),
        (128, 64, 4, 4, 2), (128, 64, 4, 6, 1), (128, 128, 4, 3, 1), (128, 128, 8, 3, 1), (128, 128, 8, 4, 1),
    )
)  # fmt: skip
SMALL_GEMM = tuple(
    Tuning(
        "SMALL_GEMM",
        max_rows,
        _CANDIDATES,
        partial(
            make_checks, max_rows=max_rows, shapes=((max_rows, 4096, 4096), (max_rows - 1, 6144, 1032), (3, 131, 203))
        ),
        partial(make_problems, max_rows=max_rows, products=LLAMA3_8B.projections),
    )
    for max_rows in (16, 32, 64)
)
ALL_PRODUCTS = tuple(product for model in MODELS for product in model.projections.values())
