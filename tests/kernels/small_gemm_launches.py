"""The small-batch linear layers that compile checks look at: projections of Llama 3 8B, and one of odd size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.linear.dense.small_gemm.config import SmallGemmWorkspace
from kernels.linear.dense.small_gemm.triton_kernel import small_gemm_triton


def launch(gpu: Gpu, num_rows: int, out_features: int, in_features: int) -> torch.Tensor:
    # Strides alone describe the weight to the compiler, so one row of memory is enough.
    weight = torch.empty(in_features, dtype=torch.bfloat16).as_strided((out_features, in_features), (0, 1))
    inputs = torch.empty(num_rows, in_features, dtype=torch.bfloat16)
    return small_gemm_triton(inputs, weight, SmallGemmWorkspace(torch.device("cpu"), 1, 64), gpu)


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "output_1": partial(launch, gpu, 1, 4096, 4096),
        "output_17": partial(launch, gpu, 17, 4096, 4096),
        "gate_up_64": partial(launch, gpu, 64, 28_672, 4096),
        "head_2": partial(launch, gpu, 2, 128_256, 4096),
        "odd_3": partial(launch, gpu, 3, 1003, 1001),
    }
