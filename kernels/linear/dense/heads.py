"""Each head's part of a row times a matrix of that head's own: what attention by latent vectors does to its heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.linear.dense.cpu import DensePanels, can_pack, pack


class HeadLinear(Protocol):
    """A matrix for each head."""

    def __call__(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Write the products into `result`, and return it; the numbers of a head are neighbours in both.

        On a CPU a row's bits do not depend on the rows beside it, nor on the number of threads.

        Shapes:
            x: `[num_rows, num_heads, num_inputs]`
            result: `[num_rows, num_heads, num_outputs]`
        """


def make_head_linear(weight: torch.Tensor) -> HeadLinear:
    """Choose the fastest form for the device and type of the matrices, `[num_heads, num_inputs, num_outputs]`."""
    if can_pack(weight.transpose(1, 2)[0]) and (library := cpu_library()) is not None:
        return KernelHeadLinear(library, weight)
    return PlainHeadLinear(weight)


@dataclass(frozen=True, slots=True, eq=False)
class PlainHeadLinear:
    """Matrices as they are."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Do what `HeadLinear` promises, but for the bits."""
        return result.copy_(torch.matmul(x.transpose(0, 1), self.weight).transpose(0, 1))


class KernelHeadLinear:
    """Matrices in panels, one head's behind another's, for the compiled CPU kernel (`heads.cpp`)."""

    def __init__(self, library: CpuLibrary, weight: torch.Tensor) -> None:
        self._library = library
        self._num_heads, _, self._num_outputs = weight.shape
        self._packed = _pack_heads(library, weight)

    def __call__(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Do what `HeadLinear` promises."""
        assert x.dtype is result.dtype is self._packed.weight.dtype, "rows and matrices have one type"
        assert x.stride(2) == result.stride(2) == 1, "the numbers of a head are neighbours"
        if x.dtype is torch.float16:
            return result.copy_(self._multiply(x.float(), torch.empty(result.shape)))
        return self._multiply(x, result)

    def _multiply(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        packed = self._packed
        self._library.head_linear(
            *(*addresses_of(x, packed.weight, result), *x.stride()[:2], *result.stride()[:2]),
            *(x.shape[0], self._num_heads, packed.num_inputs, self._num_outputs),
            *(DTYPE_NUMBERS[x.dtype], DTYPE_NUMBERS[packed.weight.dtype], torch.get_num_threads()),
        )
        return result


def _pack_heads(library: CpuLibrary, weight: torch.Tensor) -> DensePanels:
    rows = F.pad(weight.transpose(1, 2), (0, 0, 0, -weight.shape[2] % library.panel_width()))
    return pack(library, rows.flatten(0, 1).contiguous())
