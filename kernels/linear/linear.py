"""What every linear layer promises, and those that are made of something else than a packed matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from kernels.linear.rounding import InputRounding, Rows, common_rounding, round_rows


class Linear(Protocol):
    """A matrix, with an optional bias, to multiply rows with: `x @ weight.T + bias`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_features]` for `x: [num_rows, in_features]`, in the type of `x`."""

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Do the same, in float32, not rounded to the type of `x` where the form allows it."""


@runtime_checkable
class RoundsInputs(Protocol):
    """A linear layer that rounds its inputs, and takes such as were rounded by the kernel before it."""

    @property
    def rounding(self) -> InputRounding | None:
        """How; None where its parts do it in different ways."""

    def __call__(self, x: Rows) -> torch.Tensor:
        """Do what `Linear` promises; rounded rows are so as `rounding` says."""


@dataclass(frozen=True, slots=True, eq=False)
class OperationLinear:
    """A linear layer by a function that is bound to its weights, and takes `to_float32`."""

    multiply: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self.multiply(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return self.multiply(x, to_float32=True)


class WideningLinear(OperationLinear):
    """A linear layer by a function that rounds to the type of its inputs; `to_float32` only widens its results."""

    __slots__ = ()

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, and widen the results."""
        return self.multiply(x).float()


class SplitLinear:
    """Linear layers of the same input, run one after another, their features side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.rounding = common_rounding(
            [part.rounding if isinstance(part, RoundsInputs) else None for part in self._parts]
        )

    def __call__(self, x: Rows) -> torch.Tensor:
        """Multiply rows, which are rounded once where all parts round them alike."""
        rows = self._rounded(x)
        return torch.cat([part(rows) for part in self._parts], dim=1)

    def to_float32(self, x: Rows) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x` where the parts allow it."""
        rows = self._rounded(x)
        return torch.cat([part.to_float32(rows) for part in self._parts], dim=1)

    def _rounded(self, x: Rows) -> Any:
        return round_rows(x, self.rounding) if self.rounding is not None and isinstance(x, torch.Tensor) else x
