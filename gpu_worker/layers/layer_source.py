"""Where the weights of layers come from: a checkpoint's tensors, and its linear layers, dense or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.linear import LinearShape, Projection, feature_factors
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.stored_matrix import MatrixSource, PartSource, StoredMatrix, StoredPiece
from gpu_worker.quantization.quantization_method import QuantizationMethod, TensorSource
from kernels.linear.forms import DenseWeight, WeightForm, concatenate, reorder_rows, scale_rows


class WeightSource(MatrixSource, Protocol):
    """Hands out tensors by their name in the checkpoint, in the model's dtype, on its device.

    Matrices may be in the 16 bits that they are stored in, where linear layers take that for float32.
    """

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return several tensors, concatenated along their first dimension, as one."""

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor, of exactly this shape, in float32 whatever the model's dtype is."""

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones: the weights of a normalisation that has none."""

    def discard(self, pattern: str) -> None:
        """Count tensors whose whole name matches as taken: the model has no use for them."""


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The linear layers of a quantized checkpoint: how they are stored, and where."""

    method: QuantizationMethod
    source: TensorSource

    def take(self, names: Sequence[str], rows: Sequence[int], columns: int) -> WeightForm:
        """Take layers of the same input, their features one after another."""
        parts = [self.method.take(self.source, name, count, columns) for name, count in zip(names, rows, strict=True)]
        return concatenate(parts)

    def drop_empty_biases(self, names: Sequence[str]) -> None:
        """Take biases that the model does not have: zeros, which some tools write, or raise the source's `error`."""
        for name in (f"{name}.bias" for name in names):
            if self.source.has(name) and self.source.take_raw(name).any():
                raise self.source.error(name, "is not zero, but config.json has no place for it")


@dataclass(frozen=True, slots=True)
class Projections:
    """Where a model's linear layers come from.

    Attributes:
        source: Holds dense ones, and biases.
        quantized: None where all are dense.
        is_divided: Only parts of matrices are needed: they are read when it is known which.
    """

    source: WeightSource
    quantized: QuantizedLayers | None = None
    is_divided: bool = False

    def take(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        has_bias: bool = False,
        order: torch.Tensor | None = None,
        scales: Sequence[tuple[int, float]] = (),
        is_transposed: bool = False,
    ) -> Projection:
        """Take layers of the same input as one, their features one after another.

        Args:
            names: Of the layers, without `.weight`.
            rows: Their output features.
            columns: Their input features.
            has_bias: Each has a bias.
            order: `[sum(rows)]` int64, which of all these features each result is; None is in order.
            scales: How wide the parts of these features are, as they stand in the checkpoint, and what each part is
                multiplied by; nothing is by one.
            is_transposed: Dense matrices are stored `[in_features, out_features]`.
        """
        weight = None if self.is_divided else self._weight(names, rows, columns, is_transposed)
        # After the weights: only now is it certain that the checkpoint has this many features.
        factors = feature_factors(scales)
        if weight is None:
            weight = self._stored(names, rows, columns, is_transposed, order, factors)
        else:
            weight = weight if factors is None else scale_rows(weight, factors)
            weight = weight if order is None else reorder_rows(weight, order)
        if has_bias:
            bias = self.source.take_rows([f"{name}.bias" for name in names], [(n,) for n in rows])
            if factors is not None:
                bias = (bias.float() * factors.to(bias.device)).to(bias.dtype)
            return Projection(weight, bias if order is None else bias[order.to(bias.device)])
        if self.quantized is not None:
            self.quantized.drop_empty_biases(names)
        return Projection(weight)

    def _weight(self, names: Sequence[str], rows: Sequence[int], columns: int, is_transposed: bool) -> WeightForm:
        if self.quantized is not None:
            return self.quantized.take(names, rows, columns)
        if is_transposed:
            parts = [self.source.take(f"{name}.weight", columns, n).T for name, n in zip(names, rows, strict=True)]
            return DenseWeight(torch.cat(parts).contiguous())
        shapes = [(count, columns) for count in rows]
        return DenseWeight(self.source.take_rows([f"{name}.weight" for name in names], shapes))

    def _stored(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        is_transposed: bool,
        order: torch.Tensor | None,
        factors: torch.Tensor | None,
    ) -> WeightForm:
        """Leave matrices where they are; the code that divides them, or makes layers of them, reads them."""
        source, quantized = self.source, self.quantized
        assert isinstance(source, PartSource)

        def piece(name: str, count: int) -> StoredPiece:
            def read(shown: MatrixSource, shape: tuple[int, int]) -> WeightForm:
                if quantized is not None:
                    return quantized.method.take(shown, name, *shape)
                if is_transposed:
                    return DenseWeight(shown.take(f"{name}.weight", *shape[::-1]).T.contiguous())
                return DenseWeight(shown.take(f"{name}.weight", *shape))

            is_turned = is_transposed and quantized is None
            is_quantized = quantized is not None
            return StoredPiece(source, name, (count, columns), read, None, is_turned, is_quantized)

        pieces = tuple(piece(name, count) for name, count in zip(names, rows, strict=True))
        return cast("WeightForm", StoredMatrix(pieces, order, factors))


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Where the weights of a model's layers come from."""

    checkpoint: WeightSource
    projections: Projections
    block: BlockTraits
    hidden_size: int
    eps: float

    def linears(self, prefix: str, shapes: Mapping[str, LinearShape]) -> dict[str, Projection]:
        """Take the linear layers of a block of the layer `prefix`, `model.layers.3`."""
        return {name: self.linear(prefix, shape) for name, shape in shapes.items()}

    def linear(self, prefix: str, shape: LinearShape, projections: Projections | None = None) -> Projection:
        """Take one; `projections` says where it comes from, if from elsewhere than the others."""
        taken = (projections or self.projections).take(
            [f"{prefix}.{module}" for module in shape.modules],
            shape.rows,
            shape.columns,
            has_bias=shape.has_bias,
            order=shape.order,
            scales=shape.scales,
            is_transposed=shape.is_transposed,
        )
        return replace(taken, shape=shape, layer=prefix)

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return what the tokens' embeddings are multiplied by, rounded to the type that they are computed in."""
        return torch.tensor(self.block.embedding_scale, dtype=dtype).item()

    def norm(self, name: str, size: int | None = None) -> NormWeights:
        """Take a normalisation of the model's kind, of vectors of `size`, by default those of the stream."""
        kind, size = self.block.norm, size or self.hidden_size
        weight = self.checkpoint.take(f"{name}.weight", size)
        if kind.is_offset:
            # The sum stays in float32: the checkpoint's 16 bits were near zero, where they are finer than near one.
            weight = weight.float() + 1
        bias = self.checkpoint.take(f"{name}.bias", size) if kind.has_bias else None
        return NormWeights(weight, self.eps, bias, kind.is_centered)

    def norms_of_heads(self, name: str, num_heads: int, dim: int) -> torch.Tensor:
        """Take the weights of each head's normalisation, which are stored as one tensor or as one for each head."""
        if self.checkpoint.has(f"{name}.0.weight"):
            names = [f"{name}.{head}.weight" for head in range(num_heads)]
            return self.checkpoint.take_rows(names, [(dim,)] * num_heads)
        return self.checkpoint.take(f"{name}.weight", num_heads, dim).flatten()
