"""Linear layers on plain numbers, in the form that multiplies fastest on the device.

On a CPU that is the compiled kernel's packed form. Without a compiler it is oneDNN's, which is 1.3 to 3 times as fast
as `F.linear` in bfloat16 at any number of rows, and in float32 from two rows on. With one row in float32 the weights
are read once, at memory speed, either way: a single form serves all batches.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kernels.linear.dense.cpu import linear, pack_weight
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
    return WideningLinear(partial(F.linear, weight=weight, bias=bias))


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
