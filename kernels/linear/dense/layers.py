"""Linear layers on plain numbers, in the form that multiplies fastest on the device.

On a CPU that is the compiled kernel's packed form. Without a compiler it is oneDNN's, which is 1.3 to 3 times as fast
as `F.linear` in bfloat16 at any number of rows, and in float32 from two rows on. With one row in float32 the weights
are read once, at memory speed, either way: a single form serves all batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.linear.dense.cpu import DensePanels
from kernels.linear.dense.dispatch import linear, pack_weight
from kernels.linear.dense.small_gemm import SmallGemmWorkspace, can_be_preferred, small_gemm
from kernels.linear.linear import Linear

# oneDNN chooses the packed layout for a number of rows. Packed for 32, it is as fast at every other number, whereas a
# layout for one row is converted again at each call with more.
PACKED_FOR_ROWS = 32


def make_dense_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, workspace: Callable[[torch.device], SmallGemmWorkspace]
) -> Linear:
    """Choose the fastest form of a linear layer for the weight's device and dtype."""
    if (packed := pack_weight(weight, bias)) is not None:
        return KernelLinear(packed)
    if _can_pack_for_onednn(weight):
        return OneDNNLinear(weight, bias)
    if can_be_preferred(weight):
        return SmallBatchLinear(weight, bias, workspace(weight.device))
    return PlainLinear(weight, bias)


def _can_pack_for_onednn(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class KernelLinear:
    """A linear layer on the compiled kernel's packed weights."""

    __slots__ = ("packed",)

    def __init__(self, packed: DensePanels) -> None:
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return linear(x, self.packed)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, keeping the accumulators' precision."""
        return linear(x, self.packed, to_float32=True)


class PlainLinear:
    """A linear layer on the weights as they are."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return F.linear(x, self._weight, self._bias)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()


class SmallBatchLinear:
    """A linear layer on the weights as they are, on a GPU whose small batches have a kernel of their own."""

    __slots__ = ("_bias", "_weight", "_workspace")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, workspace: SmallGemmWorkspace) -> None:
        self._weight = weight
        self._bias = bias
        self._workspace = workspace

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        result = small_gemm(x, self._weight, self._workspace)
        return result if self._bias is None else result.add_(self._bias)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()


class OneDNNLinear:
    """A linear layer on oneDNN's packed weights."""

    __slots__ = ("_bias", "_multiply", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        result: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return result

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()
