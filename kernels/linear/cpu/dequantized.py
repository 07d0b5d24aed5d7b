"""Linear layers on quantized weights where no kernel of ours runs: dequantized once, as far as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from kernels.linear.forms import QuantizedWeight, ScaledWeight
from kernels.linear.linear import Linear
from kernels.linear.reference import form_linear_reference, round_inputs

_SHARE_FOR_COPIES = 0.5

_logger = logging.getLogger(__name__)


class CopyMemory:
    """The memory for dequantized copies: half of what is free at the first product, after weights and KV cache."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._has_warned = False
        self.spare_bytes: int | None = None

    def take(self, num_bytes: int) -> bool:
        """Take memory for a copy if there is enough; the first time that there is not, log that steps will be slow."""
        if self.spare_bytes is None:
            self.spare_bytes = int(self._free_bytes() * _SHARE_FOR_COPIES)
        if num_bytes > self.spare_bytes:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning("not enough memory to keep dequantized weights: each step dequantizes them, slowly")
            return False
        self.spare_bytes -= num_bytes
        return True


class DequantizedLinear:
    """A linear layer that becomes a dense one at its first call, when the type of its inputs is known.

    Where the copy does not fit, the formula dequantizes the matrix at every call. Workers call each layer before they
    are ready.
    """

    def __init__(
        self,
        form: QuantizedWeight,
        bias: torch.Tensor | None,
        make_dense: Callable[[torch.Tensor, torch.Tensor | None], Linear],
        memory: CopyMemory,
    ) -> None:
        self._form, self._bias, self._make_dense, self._memory = form, bias, make_dense, memory
        self._multiply: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        if self._multiply is None:
            self._multiply = self._chosen(x.dtype)
        return self._multiply(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows."""
        return self(x).float()

    def _chosen(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        form, (rows, columns) = self._form, self._form.shape
        if not self._memory.take(rows * columns * dtype.itemsize):
            return partial(form_linear_reference, form=form, bias=self._bias)
        dense = self._make_dense(form.dequantize().to(dtype), self._bias)
        if isinstance(form, ScaledWeight) and form.activation != "none":
            return lambda x: dense(round_inputs(x, form).to(dtype)).to(x.dtype)
        del self._form
        return lambda x: dense(x.to(dtype)).to(x.dtype)
