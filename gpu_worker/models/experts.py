"""Takes the matrices of all experts of a layer, however the checkpoint stores them.

Either each expert has tensors of its own, stored like those of any other linear layer, or a tensor holds a matrix of
all experts. What is dense and in order is read straight into one tensor; everything else expert by expert, so that
of one expert at a time there is both what the checkpoint stores and what is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.layer_weights import Projection
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.expert_stacks import ExpertStacks
from gpu_worker.models.projections import Projections
from kernels.moe import ExpertWeights

# By one of these a linear layer is recognised, whichever way its matrix is stored.
_ENDS = ("weight", "qweight", "weight_packed")


def take_experts(
    projections: Projections, shape: MixtureShape, layer: str, hidden_size: int
) -> tuple[ExpertWeights, ExpertWeights]:
    """Take the experts of a layer: gates, if they have any, and up projections, then down projections.

    Args:
        projections: The checkpoint, and how its linear layers are quantized.
        shape: Of the mixture.
        layer: The layer's name, `model.layers.3`.
        hidden_size: Features of what experts are given.

    Raises:
        Exception: What the source's `error` makes: a tensor is missing, malformed or not supported.
    """
    names, inner = shape.names, shape.expert_size
    stacks = ExpertStacks(projections, shape)
    for gate_up, down in ((f"{layer}.{one}", f"{layer}.{other}") for one, other in names.stacked):
        if stacks.has(gate_up):
            rows = shape.activation.num_projections * inner
            both = stacks.take([gate_up], rows, hidden_size, is_interleaved=names.is_interleaved)
            return both, stacks.take([down], hidden_size, inner)
    modules = [f"{layer}.{name}" for name in names.experts]
    for module in modules:
        *firsts, down = (f"{module}.{name}" for name in names.matrices)
        if stacks.has(firsts[0]):
            return stacks.take(firsts, inner, hidden_size), stacks.take([down], hidden_size, inner)
    has, first = projections.source.has, f"0.{names.matrices[0]}"
    found = (module for module in modules if any(has(f"{module}.{first}.{end}") for end in _ENDS))
    module = next(found, modules[0])
    experts = _OwnTensors(projections, shape, [f"{module}.{expert}" for expert in range(shape.num_experts)])
    *first_names, down = names.matrices
    return experts.take(first_names, inner, hidden_size), experts.take([down], hidden_size, inner)


class _OwnTensors:
    """Takes experts that have tensors of their own."""

    def __init__(self, projections: Projections, shape: MixtureShape, experts: Sequence[str]) -> None:
        self._projections = projections
        self._has_bias = shape.has_expert_biases
        self._experts = experts

    def take(self, parts: Sequence[str], rows: int, columns: int) -> ExpertWeights:
        """Take some matrices of every expert, `[rows, columns]` each, one above the other."""
        if self._projections.quantized is None and not self._has_bias:
            return self._dense(parts, rows, columns)
        taken = [
            self._projections.take(
                [f"{expert}.{part}" for part in parts], [rows] * len(parts), columns, has_bias=self._has_bias
            )
            for expert in self._experts
        ]
        return ExpertWeights(tuple(expert.weight for expert in taken), _stacked_biases(taken))

    def _dense(self, parts: Sequence[str], rows: int, columns: int) -> ExpertWeights:
        """Read all matrices into one tensor."""
        tensors = [f"{expert}.{part}.weight" for expert in self._experts for part in parts]
        whole = self._projections.source.take_rows(tensors, [(rows, columns)] * len(tensors))
        return ExpertWeights.dense(whole.view(len(self._experts), len(parts) * rows, columns))


def _stacked_biases(experts: Sequence[Projection]) -> torch.Tensor | None:
    biases = [expert.bias for expert in experts if expert.bias is not None]
    return torch.stack(biases) if biases else None
