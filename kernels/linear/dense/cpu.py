"""Linear layers by the compiled CPU kernel (`cpu.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.build import can_build
from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of


@dataclass(frozen=True, slots=True)
class DensePanels:
    """A matrix in panels of neighbouring output features, each stored in the order in which it is read.

    Attributes:
        weight: `[num_panels, num_inputs / k, panel_width, k]`, padded with zeros; `k` is 2 in bfloat16, whose products
            are those of pairs, else 1.
        bias: `[num_panels * panel_width]` float32, or None.
        num_inputs: Features of a row.
        num_outputs: Features of a result.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_inputs: int
    num_outputs: int


def can_pack(weight: torch.Tensor) -> bool:
    """Return True where the kernel supports the matrix, `[num_outputs, num_inputs]`."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPE_NUMBERS:
        return False
    return weight.shape[1] > 0 and weight.shape[1] * weight.dtype.itemsize % 4 == 0


def can_widen(weight: torch.dtype, num_inputs: int) -> bool:
    """Return True for weights of 16 bits that the kernel multiplies float32 inputs by, as if they were float32 too."""
    return weight in (torch.bfloat16, torch.float16) and num_inputs % 2 == 0


def pack(
    library: CpuLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_gated: bool = False
) -> DensePanels:
    """Pack a matrix; the plain one can be freed afterwards.

    Args:
        library: Knows the width of a panel on this machine.
        weight: Contiguous.
        bias: Added to every result; None adds nothing.
        is_gated: The first half of the features are gates of the second half. Each panel gets half of both, as the
            decoder stack multiplies them.

    Shapes:
        weight: `[num_outputs, num_inputs]`
        bias: `[num_outputs]`
    """
    width = library.panel_width()
    num_outputs, num_inputs = weight.shape
    # Two bfloat16 of a row stay together: as one word they are copied three times as fast.
    together = 2 if weight.dtype is torch.bfloat16 else 1
    rows = weight.view(torch.int32) if together == 2 else weight
    if is_gated and num_outputs % width == 0:
        # What `panel_rows` does, without a copy of its own.
        panels = rows.view(2, -1, width // 2, rows.shape[1]).transpose(0, 1)
    else:
        panels = panel_rows(rows, width, is_gated).view(-1, 1, width, rows.shape[1])
    words = panels.permute(0, 3, 1, 2).contiguous().view(weight.dtype).view(-1, rows.shape[1], width, together)
    offset = None if bias is None else panel_rows(bias.float()[:, None], width, is_gated).reshape(-1).contiguous()
    return DensePanels(words, offset, num_inputs, num_outputs)


def panel_rows(rows: torch.Tensor, width: int, is_gated: bool) -> torch.Tensor:
    """Pad output features to whole panels; put gates and their up projections into the same panel.

    Shapes:
        rows: `[num_outputs, n]`
        result: `[num_panels * width, n]`
    """
    if not is_gated:
        return F.pad(rows, (0, 0, 0, -len(rows) % width))
    half = width // 2
    gate, up = (F.pad(part, (0, 0, 0, -len(part) % half)) for part in rows.chunk(2))
    both = torch.stack((gate.view(-1, half, rows.shape[1]), up.view(-1, half, rows.shape[1])), dim=1)
    return both.reshape(-1, rows.shape[1])


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DensePanels | None:
    """Pack a matrix for `linear`, or return None where no kernel supports it."""
    if can_pack(weight) and (library := cpu_library()) is not None:
        return pack(library, weight, bias)
    return None


def keeps_half(
    stored: torch.dtype, num_inputs: int, inputs: torch.dtype, device: torch.device, *, compiles: bool = True
) -> bool:
    """Return True where a matrix of this type is best kept in its 16 bits although its inputs are float32.

    The compiled kernel widens weights as it reads them: the results are the same, and there is half as much to read.
    Without `compiles`, kernels that a compiler could make are taken to be there.
    """
    if device.type != "cpu" or inputs is not torch.float32 or not can_widen(stored, num_inputs):
        return False
    return cpu_library() is not None if compiles else can_build()


def linear(x: torch.Tensor, packed: DensePanels, *, to_float32: bool = False) -> torch.Tensor:
    """Multiply rows by a packed matrix, and add its bias, in fp32, rounded once unless `to_float32`.

    A row's bits do not depend on the rows beside it, nor on the number of threads. Products are those of bfloat16 where
    rows and matrix are, else those of both in float32.

    Shapes:
        x: `[num_rows, num_inputs]`, may be strided in its first dimension
        result: `[num_rows, num_outputs]`
    """
    library = cpu_library()
    assert library is not None
    dtype = torch.float32 if to_float32 else x.dtype
    if x.dtype is not torch.float32 and not (x.dtype is packed.weight.dtype is torch.bfloat16):
        x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    result = torch.empty(x.shape[0], packed.num_outputs, dtype=torch.float32 if to_float32 else x.dtype)
    library.linear(
        *addresses_of(x, packed.weight, packed.bias, result),
        *(x.stride(0), x.shape[0], packed.num_inputs, packed.num_outputs),
        *(DTYPE_NUMBERS[x.dtype], DTYPE_NUMBERS[packed.weight.dtype], to_float32, torch.get_num_threads()),
    )
    # Also where it would change nothing, `to` takes as long as any operation of torch.
    return result if result.dtype is dtype else result.to(dtype)
