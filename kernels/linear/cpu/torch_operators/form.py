"""What the forms of a matrix that torch's operators multiply have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch

Form = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies `[num_rows, in_features]` to `[num_rows, out_features]` of the same type; without a bias."""


class UnsupportedMatrixError(RuntimeError):
    """An operator would refuse a matrix, or read beyond its end.

    Attributes:
        form: Which form.
        shape: `(out_features, in_features)`.
    """

    def __init__(self, form: str, shape: tuple[int, int], allowed: str) -> None:
        """Name the form, the matrix, and what the operator takes."""
        super().__init__(f"{form} takes {allowed}, not {shape[0]}x{shape[1]}")
        self.form = form
        self.shape = shape
