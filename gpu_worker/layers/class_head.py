"""From a hidden vector to the logits of classes: one matrix, or two with a tangent between them. In float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The head of a model that classifies.

    Attributes:
        weight: `[num_classes, hidden_size]`.
        bias: `[num_classes]`, if it has one.
        dense: The matrix `[hidden_size, hidden_size]` before the tangent and its bias, in models that have it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, num_classes]` for `hidden: [num_rows, hidden_size]`, both float32."""
        if self.dense is not None:
            hidden = torch.tanh(functional.linear(hidden, *self.dense))
        return functional.linear(hidden, self.weight, self.bias)
