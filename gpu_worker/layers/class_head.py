"""From a hidden vector to the logits of classes: one matrix, or two with a function between them. In float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_norm import Norm
from kernels.activation import Activation, activate
from kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class ClassHead:
    """The head of a model that classifies.

    Attributes:
        classes: To the classes, `[num_classes, hidden_size]`.
        dense: The matrix `[hidden_size, hidden_size]` before the function, in models that have it.
        activation: The function; None is the tangent.
        norm: Of its results, in models that have it.
    """

    classes: Linear
    dense: Linear | None = None
    activation: Activation | None = None
    norm: Norm | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, num_classes]` for `hidden: [num_rows, hidden_size]`, both float32."""
        if self.dense is not None:
            hidden = self.dense(hidden)
            if self.activation is None:
                # Row by row: of several at once, torch rounds a number by where it lies among all of them.
                hidden = torch.cat([torch.tanh(row) for row in torch.split(hidden, 1)])
            else:
                hidden = activate(hidden, self.activation)
        return self.classes(hidden if self.norm is None else self.norm(hidden))
