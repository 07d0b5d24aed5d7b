"""The products with packed matrices that compile checks look at: projections of Llama 3 8B, and some of odd size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu_config import Gpu
from kernels.linear.forms import FLOAT8, INT4, INT8, Number
from kernels.linear.gpu_packed.group_numbers import GroupLayout, GroupNumbers
from kernels.linear.gpu_packed.matrix import ROW_MULTIPLE, TILE_ROWS, PackedMatrix, num_planes
from kernels.linear.gpu_packed.pack import PLANES
from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton
from kernels.linear.gpu_packed.triton_product import packed_linear_triton

BFLOAT16 = torch.bfloat16


def describe(number: Number, rows: int, columns: int, group_size: int, has_offsets: bool) -> PackedMatrix:
    """Return a matrix of the right shapes; the compiler asks for no values, so it has little memory."""
    plane = next(plane for plane in PLANES if group_size % plane == 0)
    num_tiles = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE // TILE_ROWS
    num_blocks = -(-columns // (num_planes(number) * plane))
    words = torch.empty(1, dtype=torch.int16).expand(num_tiles, num_blocks, TILE_ROWS, plane)
    layout = GroupLayout(group_size, plane, num_planes(number), num_blocks)
    # Scales of GGUF's small groups are products of two numbers, which 16 bits do not hold.
    kinds = ("FP32" if group_size <= 32 else "FP16", "FP32")
    scales, offsets = (describe_groups(layout, num_tiles * TILE_ROWS, kind) for kind in kinds)
    counters = torch.zeros(1, dtype=torch.int32)
    offsets = offsets if has_offsets else None
    return PackedMatrix(number, words, scales, offsets, group_size, rows, columns, None, counters)


def describe_groups(layout: GroupLayout, padded_rows: int, kind: str) -> GroupNumbers:
    """Return numbers as exact as published ones are: scales of 16 bits, offsets of 32."""
    wanted = 2**-5 if kind == "E8M0" else 1.25 if kind == "FP16" else 1 + 2**-20
    columns = layout.num_blocks * layout.num_planes * layout.plane
    numbers = torch.full((padded_rows, -(-columns // layout.group_size)), wanted)
    return layout.pack([numbers], padded_rows)[0]


def launch(
    gpu: Gpu,
    number: Number,
    num_rows: int,
    shape: tuple[int, int],
    group_size: int = 128,
    has_offsets: bool = False,
    dtype: torch.dtype = BFLOAT16,
) -> torch.Tensor:
    matrix = describe(number, *shape, group_size, has_offsets)
    inputs = torch.empty(num_rows, shape[1], dtype=dtype)
    return packed_linear_triton(inputs, matrix, None, dtype, gpu)


OUTPUT, GATE_UP = (4096, 4096), (28_672, 4096)


def launches(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    product = partial(launch, gpu)
    return {
        "int4_1": partial(product, INT4, 1, OUTPUT),
        "int4_64": partial(product, INT4, 64, GATE_UP),
        "int4_256": partial(product, INT4, 256, GATE_UP),
        "int4_offsets_1": partial(product, INT4, 1, OUTPUT, 128, True),
        "int4_offsets_64": partial(product, INT4, 64, GATE_UP, 128, True),
        "int4_group_32_16": partial(product, INT4, 16, OUTPUT, 32, True),
        "int8_16": partial(product, INT8, 16, OUTPUT),
        "int8_group_16_1": partial(product, INT8, 1, OUTPUT, 16),
        "int8_group_16_64": partial(product, INT8, 64, GATE_UP, 16),
        "int8_group_16_256": partial(product, INT8, 256, GATE_UP, 16),
        "fp8_1": partial(product, FLOAT8, 1, OUTPUT, 4096),
        "one_block_1": partial(product, INT8, 1, (60, 100)),
        "odd_3": partial(product, INT4, 3, (1003, 1001), 64, True),
        "dequantize": lambda: dequantize_triton(describe(INT4, *GATE_UP, 128, True), BFLOAT16),
    }
