"""From hidden vectors to scores of the vocabulary: the head at the top of a model."""

from __future__ import annotations

import torch

from kernels.linear import Linear
from kernels.linear.cpu import KernelQuantizedLinear
from kernels.linear.dense import KernelLinear
from kernels.linear.panels import PanelMatrix


class LMHead:
    """Scores every token of the vocabulary for each hidden vector."""

    __slots__ = ("_dtype", "_projection")

    def __init__(self, projection: Linear, dtype: torch.dtype) -> None:
        """Hold the projection from `hidden_size` to `vocab_size`, which takes vectors of this type."""
        self._projection = projection
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[num_rows, vocab_size]` for `hidden: [num_rows, hidden_size]`."""
        return self._projection.to_float32(hidden.to(self._dtype))

    def packed_for(self, dtype: torch.dtype) -> PanelMatrix | None:
        """Return the matrix as the CPU kernels take it, to multiply vectors of this type; None when there is none."""
        if dtype is self._dtype and isinstance(self._projection, KernelLinear | KernelQuantizedLinear):
            return self._projection.packed
        return None
