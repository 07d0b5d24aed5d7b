"""Packs matrices for the compiled kernel, where there is one."""

from __future__ import annotations

import torch

from kernels.cpu_library import cpu_library
from kernels.linear.dense.cpu import DensePanels, can_pack, linear_cpu, pack


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DensePanels | None:
    """Pack a matrix for `linear`, or return None where no kernel supports it.

    Shapes:
        weight: `[num_outputs, num_inputs]`
        bias: `[num_outputs]`
    """
    if can_pack(weight) and (library := cpu_library()) is not None:
        return pack(library, weight, bias)
    return None


def linear(x: torch.Tensor, packed: DensePanels, *, to_float32: bool = False) -> torch.Tensor:
    """Multiply rows by a packed matrix, and add its bias, in fp32, rounded once.

    A row's bits do not depend on the rows beside it, nor on the number of threads.

    Args:
        x: May be strided in its first dimension; of the matrix's type.
        packed: Made by `pack_weight`.
        to_float32: Leave the result in fp32.

    Shapes:
        x: `[num_rows, num_inputs]`
        result: `[num_rows, num_outputs]`
    """
    library = cpu_library()
    assert library is not None
    return linear_cpu(library, x, packed, to_float32=to_float32)
