"""Linear layers on plain numbers, in the form that multiplies fastest on the device.

On a CPU that is the compiled kernel's packed form. Without a compiler it is oneDNN's, which is 1.3 to 3 times as fast
as `F.linear` in bfloat16 at any number of rows, and in float32 from two rows on. With one row in float32 the weights
are read once, at memory speed, either way: a single form serves all batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.linear.dense.cpu import DensePanels, can_pack, linear, pack, pack_weight
from kernels.linear.linear import Linear, OperationLinear, WideningLinear

# oneDNN chooses the packed layout for a number of rows. Packed for 32, it is as fast at every other number, whereas a
# layout for one row is converted again at each call with more.
PACKED_FOR_ROWS = 32


def make_dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Choose the fastest form of a linear layer for the weight's device and dtype."""
    if (packed := pack_weight(weight, bias)) is not None:
        return OperationLinear(partial(linear, packed=packed))
    if _can_pack_for_onednn(weight):
        return WideningLinear(partial(onednn_linear, weight=pack_for_onednn(weight), bias=bias))
    if weight.dtype is torch.float32:
        return NarrowingLinear(weight, bias)
    return WideningLinear(partial(F.linear, weight=weight, bias=bias))


class NarrowingLinear:
    """A matrix of float32, rounded at its first call to the type of the inputs, which torch's products ask for.

    A quantized matrix that was taken apart is dense in float32, whatever the model computes in
    (`kernels.linear.forms`). Workers call each layer before they are ready.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        if self._weight.dtype is torch.float32 and x.dtype is not torch.float32:
            self._weight = self._weight.to(x.dtype)
            self._bias = None if self._bias is None else self._bias.to(x.dtype)
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, and widen the results."""
        return self(x).float()


def _can_pack_for_onednn(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_for_onednn(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix as `onednn_linear` takes it; the plain one can be freed."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply rows by a matrix in oneDNN's packed layout, by the operator that `torch.compile` uses on CPUs."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result


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
