"""The products of 8-bit inputs that compile checks look at: projections of Llama 3 8B, and some of odd size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.gpu_scaled.matrix import ScaledMatrix
from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton
from kernels.linear.rounding import InputRounding
from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
OUTPUT, GATE_UP = (4096, 4096), (28_672, 4096)


def launch(
    gpu: Gpu, dtype: torch.dtype, num_rows: int, shape: tuple[int, int], has_blocks: bool = False
) -> torch.Tensor:
    # Strides alone describe the weight to the compiler, so one row of memory is enough.
    values = torch.empty(shape[1], dtype=dtype).as_strided(shape, (0, 1))
    scales = torch.empty(1, -(-shape[1] // 128)) if has_blocks else torch.empty(shape[0])
    matrix = ScaledMatrix(values, scales, None, torch.zeros(1, dtype=torch.int32))
    inputs = torch.empty(num_rows, shape[1], dtype=dtype)
    return scaled_linear_triton(
        inputs, scales if has_blocks else torch.empty(num_rows, 1), matrix, None, torch.bfloat16, gpu
    )


def quantize(dtype: torch.dtype, size: int, has_blocks: bool = False) -> torch.Tensor:
    rounding = InputRounding(dtype, has_blocks=has_blocks)
    return quantize_tokens_triton(torch.empty(3, size, dtype=torch.bfloat16), rounding).values


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    product = partial(launch, gpu)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "int8_1": partial(product, INT8, 1, OUTPUT),
        "int8_64": partial(product, INT8, 64, GATE_UP),
        "int8_2048": partial(product, INT8, 2048, GATE_UP),
        "one_block_1": partial(product, INT8, 1, (60, 64)),
        "odd_3": partial(product, INT8, 3, (1003, 1001)),
        "quantize_int8": partial(quantize, INT8, 14_336),
    }
    if gpu.generation is not GpuGeneration.AMPERE:
        found |= {
            "fp8_1": partial(product, FLOAT8, 1, OUTPUT),
            "fp8_64": partial(product, FLOAT8, 64, GATE_UP),
            "fp8_2048": partial(product, FLOAT8, 2048, GATE_UP),
            "fp8_blocks_1": partial(product, FLOAT8, 1, OUTPUT, True),
            "fp8_blocks_2048": partial(product, FLOAT8, 2048, GATE_UP, True),
            "quantize_fp8": partial(quantize, FLOAT8, 4096),
            "quantize_fp8_blocks": partial(quantize, FLOAT8, 4096, True),
        }
    return found
