"""GGUF as a quantization method: each tensor has a type of its own, which the file names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_worker.quantization.gguf.blocks import NonFiniteScaleError, unpack
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.tensor_names import tensors_by_name
from gpu_worker.quantization.gguf.tensor_types import TensorType
from gpu_worker.quantization.quantization_method import TensorSource
from kernels.linear.forms import DenseWeight, WeightForm

NAME = "gguf"


@dataclass(frozen=True, slots=True)
class GGUFMethod:
    """Linear layers of a GGUF file, whose tensors' `types` are by the names that checkpoints give them."""

    types: Mapping[str, TensorType]
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Take a linear layer's weights: groups of 32 or 16 columns, or dense; raises what `source.error` makes."""
        stored = f"{name}.weight"
        kind = self.types.get(stored)
        if kind is None or kind.bits is None:
            return DenseWeight(source.take(stored, out_features, in_features))
        return self._unpack(source, stored, source.take_raw(stored), kind, (out_features, in_features))

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Do what `StackMethod` promises."""
        kind = self.types.get(f"{name}.weight")
        return kind is not None and kind.bits is not None

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Do what `StackMethod` promises."""
        stored = f"{name}.weight"
        if source.shape(stored) != shape:
            raise source.error(stored, f"has shape {list(source.shape(stored))}; the metadata call for {list(shape)}")
        return self._unpack(source, stored, source.take_raw_item(stored, index), self.types[stored], shape[1:])

    def _unpack(
        self, source: TensorSource, stored: str, raw: torch.Tensor, kind: TensorType, shape: tuple[int, int]
    ) -> WeightForm:
        columns = raw.shape[1] // kind.block_bytes * kind.block_size
        if (raw.shape[0], columns) != shape:
            problem = f"has shape {[raw.shape[0], columns]}; the metadata call for {list(shape)}"
            raise source.error(stored, problem)
        try:
            return unpack(raw, kind)
        except NonFiniteScaleError:
            raise source.error(stored, "has a scale that is not a finite number; copy the file again") from None


def read_gguf_method(file: GGUFFile) -> GGUFMethod | None:
    """Return how a file's linear layers are quantized; None where all are dense."""
    types = {name: info.type for name, info in tensors_by_name(file).items()}
    return GGUFMethod(types) if any(kind.bits is not None for kind in types.values()) else None
