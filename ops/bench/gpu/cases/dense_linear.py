"""The linear layers of a decode step by cuBLAS: what a product with few rows reaches of the memory's rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ops.bench.gpu.case import OURS, Case, Op, relative_error, sets_for, sizes
from ops.bench.gpu.shapes import DENSE_MODELS, LLAMA3_8B


def product_error(device: torch.device, num_rows: int, out_features: int, in_features: int) -> float:
    """Compare with float64."""
    inputs = torch.randn(num_rows, in_features, device=device).bfloat16()
    weight = torch.randn(out_features, in_features, device=device).bfloat16()
    return relative_error(F.linear(inputs, weight), inputs.double() @ weight.double().T)


def product_case(device: torch.device, num_rows: int, out_features: int, in_features: int) -> Case:
    """Read the weight once."""
    num_bytes = 2 * (out_features * in_features + num_rows * (in_features + out_features))
    num_sets = sets_for(2 * out_features * in_features)
    weights = torch.randn(num_sets, out_features, in_features, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(num_rows, in_features, device=device, dtype=torch.bfloat16)
    candidates = {OURS: lambda index: F.linear(inputs, weights[index])}
    return Case(num_bytes, 2 * num_rows * out_features * in_features, num_sets, candidates)


def _timed() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for model in DENSE_MODELS:
        for name, product in model.projections.items():
            for rows in (1, 4, 16, 32, 64) if model is LLAMA3_8B else (1, 16):
                yield from sizes((rows, *product), prefix=f"{model.name} {name} ").items()


DENSE_LINEAR = Op(product_error, product_case).suite(
    "dense_linear", sizes((1, 4096, 4096), (16, 1000, 1032), (3, 131, 203), prefix="bf16 "), dict(_timed())
)
