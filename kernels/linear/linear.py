"""What every linear layer promises, and the two that are made of something else than a packed matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Linear(Protocol):
    """A matrix, with an optional bias, to multiply rows with: `x @ weight.T + bias`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_features]` for `x: [num_rows, in_features]`, in the type of `x`."""
        ...

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Do the same, in float32, not rounded to the type of `x` where the form allows it."""
        ...


class OperationLinear:
    """A linear layer by a function that is bound to its weights, and takes `to_float32`."""

    __slots__ = ("_multiply",)

    def __init__(self, multiply: Callable[..., torch.Tensor]) -> None:
        """Hold the function."""
        self._multiply = multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self._multiply(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x`."""
        return self._multiply(x, to_float32=True)


class SplitLinear:
    """Linear layers of the same input, run one after another, their features side by side."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        """Hold the layers."""
        self._parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return torch.cat([part(x) for part in self._parts], dim=1)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows, not rounded to the type of `x` where the parts allow it."""
        return torch.cat([part.to_float32(x) for part in self._parts], dim=1)
