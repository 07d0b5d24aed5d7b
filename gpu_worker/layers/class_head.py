"""From a hidden vector to the logits of classes: one matrix, or two with a tangent between them. In float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The head of a model that classifies.

    Attributes:
        classes: To the classes, `[num_classes, hidden_size]`.
        dense: The matrix `[hidden_size, hidden_size]` before the tangent, in models that have it.
    """

    classes: Linear
    dense: Linear | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, num_classes]` for `hidden: [num_rows, hidden_size]`, both float32."""
        if self.dense is not None:
            # Row by row: of several at once, torch rounds a number by where it lies among all of them.
            hidden = torch.cat([torch.tanh(row) for row in torch.split(self.dense(hidden), 1)])
        return self.classes(hidden)
