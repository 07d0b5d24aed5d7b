"""Linear layers whose plain weights are rounded when they are made, for whole steps on weights of fewer bits."""

from __future__ import annotations

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from kernels.linear import Linear, LinearFactory
from kernels.linear.forms import INT4, DenseWeight, GroupQuantizedWeight, QuantizedWeight, ScaledWeight, WeightForm

ROUNDED = ("fp8", "int4")
"""Float8 with a scale a row, inputs rounded too; 4-bit integers in groups of 128, as GPTQ has them."""
_GROUP_SIZE = 128
# More rows than these are a vocabulary's, which checkpoints keep in 16 bits.
_MAX_ROWS = 65_536


class RoundedLinears(LinearFactory):
    """Makes layers of weights that it rounds; all have as many bits.

    Attributes:
        saved_bytes: Of the weights so far, less than they had.
    """

    __slots__ = ("_rounded", "saved_bytes")

    def __init__(self, rounded: str) -> None:
        """Round to one of `ROUNDED`."""
        super().__init__(free_host_bytes)
        assert rounded in ROUNDED
        self._rounded = rounded
        self.saved_bytes = 0

    def make(self, weight: torch.Tensor | WeightForm, bias: torch.Tensor | None = None) -> Linear:
        """Do what `LinearFactory` does, with a weight that is rounded if it is plain."""
        plain = weight.weight if isinstance(weight, DenseWeight) else weight
        if not isinstance(plain, torch.Tensor) or plain.shape[0] > _MAX_ROWS:
            return super().make(weight, bias)
        form = self._form(plain)
        self.saved_bytes += plain.nbytes - form.num_bytes
        return super().make(form, bias)

    def _form(self, plain: torch.Tensor) -> QuantizedWeight:
        if self._rounded == "fp8":
            scales = plain.abs().amax(dim=1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
            return ScaledWeight((plain / scales).to(torch.float8_e4m3fn), scales, "dynamic")
        groups = plain.float().view(len(plain), -1, min(_GROUP_SIZE, plain.shape[1]))
        scales = groups.abs().amax(dim=2) / 7
        codes = ((groups / scales[..., None]).round() + 8).flatten(1).to(torch.uint8)
        values = codes[:, ::2] | codes[:, 1::2] << 4
        return GroupQuantizedWeight(values, INT4, groups.shape[2], scales, -8 * scales)
