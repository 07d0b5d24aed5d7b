"""Packs matrices for the compiled kernel, where there is one."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.linear.dense.cpu import DensePanels, can_pack, can_widen, linear_cpu, pack


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DensePanels | None:
    """Pack a matrix for `linear`, or return None where no kernel supports it."""
    if can_pack(weight) and (library := cpu_library()) is not None:
        return pack(library, weight, bias)
    return None


def keeps_half(stored: torch.dtype, num_inputs: int, inputs: torch.dtype, device: torch.device) -> bool:
    """Return True where a matrix of this type is best kept in its 16 bits although its inputs are float32.

    The compiled kernel widens weights as it reads them: the results are the same, and there is half as much to read.
    """
    if device.type != "cpu" or inputs is not torch.float32 or not can_widen(stored, num_inputs):
        return False
    return cpu_library() is not None


def linear(x: torch.Tensor, packed: DensePanels, *, to_float32: bool = False) -> torch.Tensor:
    """Multiply rows by a packed matrix, and add its bias, in fp32, rounded once.

    A row's bits do not depend on the rows beside it, nor on the number of threads.

    Args:
        x: May be strided in its first dimension. Products are those of bfloat16 where it and the matrix are, else those
            of both in float32.
        packed: Made by `pack_weight`.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, num_inputs]`
        result: `[num_rows, num_outputs]`
    """
    library = cpu_library()
    assert library is not None
    return linear_cpu(library, x, packed, to_float32=to_float32)
