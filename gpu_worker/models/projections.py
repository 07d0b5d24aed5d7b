"""Takes a model's linear layers, dense or quantized, several of the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.layers.layer_weights import Projection
from gpu_worker.models.weight_source import WeightSource
from gpu_worker.quantization.quantization_method import QuantizationMethod
from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import DenseWeight, WeightForm, concatenate, reorder_rows, scale_rows


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
        """Take biases that the model does not have: some tools write zeros for them.

        Raises:
            Exception: What the source's `error` makes: one is not zero.
        """
        for name in (f"{name}.bias" for name in names):
            if self.source.has(name) and self.source.take_raw(name).any():
                raise self.source.error(name, "is not zero, but config.json has no place for it")


@dataclass(frozen=True, slots=True)
class Projections:
    """Where a model's linear layers come from; `quantized` is None where all are dense."""

    source: WeightSource
    quantized: QuantizedLayers | None = None

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
        weight = self._weight(names, rows, columns, is_transposed)
        # Behind the weights: only now is it certain that the checkpoint has so many features.
        factors = feature_factors(scales)
        if factors is not None:
            weight = scale_rows(weight, factors)
        if order is not None:
            weight = reorder_rows(weight, order)
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


def feature_factors(scales: Sequence[tuple[int, float]]) -> torch.Tensor | None:
    """Return a factor for each feature, of parts of these widths; None where all are one.

    Shapes:
        result: `[sum(widths)]` float32
    """
    if all(scale == 1 for _, scale in scales):
        return None
    widths, factors = zip(*scales, strict=True)
    return torch.tensor(factors).repeat_interleave(torch.tensor(widths))
