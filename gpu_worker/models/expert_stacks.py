"""Takes matrices of all experts that one tensor holds, in plain numbers or as a quantization method stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.projections import Projections
from gpu_worker.quantization.quantization_method import StackMethod
from kernels.linear.forms import DenseWeight, WeightForm, concatenate, reorder_rows
from kernels.moe import ExpertWeights


class ExpertStacks:
    """Tensors `[num_experts, ...]` of one checkpoint."""

    def __init__(self, projections: Projections, shape: MixtureShape) -> None:
        """Take them from `projections`."""
        self._source = projections.source
        self._quantized = projections.quantized
        self._shape = shape

    def has(self, name: str) -> bool:
        """Whether there is such a stack."""
        return self._source.has(name) or self._source.has(f"{name}.weight") or self._method(name) is not None

    def take(self, names: Sequence[str], rows: int, columns: int, *, is_interleaved: bool = False) -> ExpertWeights:
        """Take the matrices of one or several stacks, those of an expert one above the other.

        Args:
            names: Of the stacks.
            rows: Output features of a matrix.
            columns: Input features.
            is_interleaved: Even rows belong above odd ones.

        Raises:
            Exception: What the source's `error` makes.
        """
        biases = [self._bias(name, rows) for name in names] if self._shape.has_expert_biases else []
        bias = torch.cat(biases, dim=1) if biases else None
        if bias is not None and is_interleaved:
            bias = torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1)
        is_transposed = [self._is_transposed(name, rows, columns) for name in names]
        is_whole = len(names) == 1 and not (is_interleaved or is_transposed[0])
        if is_whole and self._method(names[0]) is None:
            whole = self._source.take(self._tensor(names[0]), self._shape.num_experts, rows, columns)
            return ExpertWeights.dense(whole, bias)
        forms = []
        for expert in range(self._shape.num_experts):
            taken = zip(names, is_transposed, strict=True)
            form = concatenate([self._item(name, expert, rows, columns, turned) for name, turned in taken])
            forms.append(_apart(form) if is_interleaved else form)
        return ExpertWeights(tuple(forms), bias)

    def _item(self, name: str, expert: int, rows: int, columns: int, is_transposed: bool) -> WeightForm:
        """Take one expert's matrix of a stack."""
        method = self._method(name)
        count = self._shape.num_experts
        if method is not None:
            assert self._quantized is not None
            return method.take_item(self._quantized.source, name, expert, (count, rows, columns))
        tensor = self._tensor(name)
        if is_transposed:
            return DenseWeight(self._source.take_item(tensor, expert, count, columns, rows).T.contiguous())
        return DenseWeight(self._source.take_item(tensor, expert, count, rows, columns))

    def _is_transposed(self, name: str, rows: int, columns: int) -> bool:
        """Whether matrices of a stack are `[columns, rows]`: so those are whose shape does not tell."""
        is_transposed = self._shape.names.is_transposed
        if is_transposed is not None or self._method(name) is not None:
            return bool(is_transposed)
        return self._source.shape(self._tensor(name))[1:] == (columns, rows)

    def _bias(self, name: str, rows: int) -> torch.Tensor:
        tensor = next((name for name in (f"{name}_bias", f"{name}.bias") if self._source.has(name)), f"{name}_bias")
        return self._source.take(tensor, self._shape.num_experts, rows)

    def _tensor(self, name: str) -> str:
        return f"{name}.weight" if self._source.has(f"{name}.weight") else name

    def _method(self, name: str) -> StackMethod | None:
        """Return the method by which a stack is quantized; None where it is not."""
        if self._quantized is None or not isinstance(method := self._quantized.method, StackMethod):
            return None
        return method if method.has_stack(self._quantized.source, name) else None


def _apart(form: WeightForm) -> WeightForm:
    """Return a matrix with its even rows above its odd ones."""
    return reorder_rows(form, torch.arange(form.shape[0]).view(-1, 2).T.flatten())
