"""Matrices of the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.scaled import ScaledWeight


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix of floating point numbers, `[out_features, in_features]`."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.weight.nbytes

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        return self.weight.float()

    def to(self, device: torch.device) -> DenseWeight:
        """Return the same weights on a device."""
        return DenseWeight(self.weight.to(device))

    def join(self, lower: object) -> DenseWeight | None:
        """Return both matrices as one, this one above, or None when they are unlike."""
        if not isinstance(lower, DenseWeight) or lower.weight.dtype is not self.weight.dtype:
            return None
        return DenseWeight(torch.cat((self.weight, lower.weight)))


QuantizedWeight = GroupQuantizedWeight | ScaledWeight
UnsplitWeight = DenseWeight | QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class SplitWeight:
    """Matrices of the same input, one above the other, that no single form can hold."""

    parts: tuple[UnsplitWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in float32."""
        return torch.cat([part.dequantize() for part in self.parts])

    def to(self, device: torch.device) -> SplitWeight:
        """Return the same weights on a device."""
        return SplitWeight(tuple(part.to(device) for part in self.parts))


WeightForm = UnsplitWeight | SplitWeight


def concatenate(forms: Sequence[WeightForm]) -> WeightForm:
    """Put matrices of the same input one above the other; those of unlike form stay parts of a `SplitWeight`.

    Raises:
        ValueError: There are none, or they have different numbers of input features.
    """
    if len({form.shape[1] for form in forms}) != 1:
        raise ValueError(f"cannot concatenate weights with input features {[form.shape[1] for form in forms]}")
    merged: list[UnsplitWeight] = []
    for form in forms:
        for part in form.parts if isinstance(form, SplitWeight) else (form,):
            joined = merged[-1].join(part) if merged else None
            if joined is None:
                merged.append(part)
            else:
                merged[-1] = joined
    return merged[0] if len(merged) == 1 else SplitWeight(tuple(merged))
