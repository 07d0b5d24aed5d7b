"""The linear layers of a decode step, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.dense.small_gemm import SmallGemmWorkspace, small_gemm
from kernels.linear.product_launch import ProductLaunch
from ops.bench.gpu.case import OURS, Candidate, Case, Entry, Op, relative_error, sets_for, sizes
from ops.bench.gpu.shapes import DENSE_MODELS, LLAMA3_8B


def _kernel(
    workspace: SmallGemmWorkspace, device: torch.device, max_rows: int, num_splits: int | None = None
) -> Callable[..., torch.Tensor]:
    """Return our kernel itself, whatever the tables prefer; where there is no GPU, the dispatched op.

    An entry that it is given is of the table's launches for up to `max_rows` rows.
    """
    if device.type != "cuda":
        return lambda inputs, weight, entry=None: small_gemm(inputs, weight, workspace)
    from kernels.linear.dense.small_gemm.triton_kernel import small_gemm_triton

    gpu = gpu_of(device)

    def multiply(inputs: torch.Tensor, weight: torch.Tensor, entry: Entry | None = None) -> torch.Tensor:
        launch = None if entry is None else ProductLaunch(block_m=max_rows, **entry)
        return small_gemm_triton(inputs, weight, workspace, gpu, launch, num_splits)

    return multiply


def product_error(
    device: torch.device,
    num_rows: int,
    out_features: int,
    in_features: int,
    entry: Entry | None = None,
    max_rows: int = 0,
) -> float:
    """Compare with float64, twice with one workspace; `max_rows` is the entry's."""
    workspace = SmallGemmWorkspace(device, num_rows, out_features) if entry is None else SmallGemmWorkspace(device)
    workspace.partials.fill_(float("nan"))
    multiply = _kernel(workspace, device, max_rows)
    errors = []
    for _ in range(2):
        inputs = torch.randn(num_rows, in_features, device=device).bfloat16()
        weight = torch.randn(out_features, in_features, device=device).bfloat16()
        errors.append(relative_error(multiply(inputs, weight, entry), inputs.double() @ weight.double().T))
    return max(errors)


def product_case(
    device: torch.device,
    num_rows: int,
    out_features: int,
    in_features: int,
    other_splits: tuple[int, ...] = (),
    max_rows: int | None = None,
) -> Case:
    """Read the weight once; `other_splits` are timed beside the number that the tables choose.

    An entry that ours is given is for up to `max_rows` rows; if not given, as many as there are.
    """
    num_bytes = 2 * (out_features * in_features + num_rows * (in_features + out_features))
    num_sets = sets_for(2 * out_features * in_features)
    weights = torch.randn(num_sets, out_features, in_features, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(num_rows, in_features, device=device, dtype=torch.bfloat16)
    workspace = SmallGemmWorkspace(device)
    ours = _kernel(workspace, device, max_rows or num_rows)
    candidates: dict[str, Candidate] = {
        OURS: lambda index, entry=None: ours(inputs, weights[index], entry),
        "cuBLAS": lambda index: F.linear(inputs, weights[index]),
    }
    for splits in other_splits:
        multiply = _kernel(workspace, device, num_rows, splits)
        candidates[f"{OURS}/{splits}"] = partial(lambda multiply, index: multiply(inputs, weights[index]), multiply)
    return Case(num_bytes, 2 * num_rows * out_features * in_features, num_sets, candidates)


def _timed() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for model in DENSE_MODELS:
        rows_of_model, splits = ((1, 4, 16, 32, 64), (1, 2, 4, 8)) if model is LLAMA3_8B else ((1, 16), ())
        for name, product in model.projections.items():
            for rows in rows_of_model:
                [(label, shape)] = sizes((rows, *product), prefix=f"{model.name} {name} ").items()
                yield label, (*shape, splits)


SMALL_GEMM_OP = Op(product_error, product_case)
SMALL_GEMM = SMALL_GEMM_OP.suite(
    "small_gemm",
    sizes((1, 4096, 4096), (16, 1000, 1032), (33, 6144, 4096), (64, 28_672, 1024), (3, 131, 203), prefix="bf16 "),
    dict(_timed()),
)
