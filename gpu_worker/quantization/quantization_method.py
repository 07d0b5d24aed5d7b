"""What every quantization method promises: the engine's form of a linear layer's weights."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import WeightForm


class QuantizationMethod(Protocol):
    """How a checkpoint stores its linear layers. Holds what the configuration says, no state."""

    @property
    def name(self) -> str:
        """As configurations call it."""
        ...

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Take the weights of a linear layer, `name` without `.weight`; a `DenseWeight` where it was left alone.

        Raises:
            Exception: What `source.error` makes: a tensor is missing, malformed or not supported.
        """
        ...


@runtime_checkable
class StackMethod(Protocol):
    """A method that also stores matrices of all experts of a layer in one tensor."""

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Whether a stack of this name is quantized."""
        ...

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Take matrix `index` of a stack of `(num_matrices, out_features, in_features)`, in order; raises as `take`."""
        ...
