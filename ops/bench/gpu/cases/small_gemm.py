"""The linear layers of a decode step, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.dense.small_gemm import SmallGemmWorkspace, small_gemm
from kernels.linear.product_launch import ProductLaunch
from ops.bench.gpu.case import OURS, Candidate, Case, CaseSpec, Check, Entry, OpSuite, relative_error, sets_for
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
        launch = None if entry is None else ProductLaunch(max_rows, **entry)
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


def _specs() -> list[CaseSpec]:
    specs = []
    for model in DENSE_MODELS:
        rows_of_model, splits = ((1, 4, 16, 32, 64), (1, 2, 4, 8)) if model is LLAMA3_8B else ((1, 16), ())
        for name, (out_features, in_features) in model.projections.items():
            for rows in rows_of_model:
                build = partial(
                    product_case,
                    num_rows=rows,
                    out_features=out_features,
                    in_features=in_features,
                    other_splits=splits,
                )
                specs.append(CaseSpec(f"{model.name} {name} {rows}x{out_features}x{in_features}", build))
    return specs


SMALL_GEMM = OpSuite(
    "small_gemm",
    lambda device: [
        Check(f"bf16 {rows}x{out}x{size}", partial(product_error, device, rows, out, size), 4e-3)
        for rows, out, size in ((1, 4096, 4096), (16, 1000, 1032), (33, 6144, 4096), (64, 28_672, 1024), (3, 131, 203))
    ],
    tuple(_specs()),
)
