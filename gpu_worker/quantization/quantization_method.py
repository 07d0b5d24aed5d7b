"""What every quantization method promises: the engine's form of a linear layer's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from kernels.linear.forms import WeightForm

KeepsHalf = Callable[[torch.dtype, int], bool]
"""Whether a matrix stays in the 16 bits that it is stored in, by that type and its number of columns."""


class TensorSource(Protocol):
    """Hands out tensors by their name in the checkpoint, on the model's device; knows which were taken.

    A missing tensor, or one of another shape or dtype than is asked for, raises what `error` makes.
    """

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def stored_module(self, name: str) -> str:
        """Return what the checkpoint calls a module, which is what its configuration means."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape: of quantized blocks, as the source counts their numbers."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return one floating point tensor, of exactly this shape, in the model's dtype or the stored 16 bits."""

    def take_raw(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor, of whatever shape and dtype it is stored in."""

    def take_raw_item(self, name: str, index: int) -> torch.Tensor:
        """Return a copy of an item of a stack as stored; items are taken in order."""

    def error(self, name: str, problem: str) -> Exception:
        """Make the error that names a tensor and where it is stored."""


class QuantizationMethod(Protocol):
    """How a checkpoint stores its linear layers. Holds what the configuration says, no state."""

    @property
    def name(self) -> str:
        """As configurations call it."""

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Take the weights of a linear layer, `name` without `.weight`; a `DenseWeight` where it was left alone.

        Raises:
            Exception: What `source.error` makes: a tensor is missing, malformed or not supported.
        """


@runtime_checkable
class StackMethod(Protocol):
    """A method that also stores matrices of all experts of a layer in one tensor."""

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Whether a stack of this name is quantized."""

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Take matrix `index` of a stack of `(num_matrices, out_features, in_features)`, in order; raises as `take`."""
