"""Takes the matrices of all experts of a layer, however the checkpoint stores them.

Either each expert has tensors of its own, stored like those of any other linear layer, or a tensor holds a matrix of
all experts. Dense matrices in order are read straight into one tensor; all others expert by expert, so that memory
holds both the stored and the converted form of one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from gpu_worker.layers.layer_source import Projections
from gpu_worker.layers.stored_matrix import MatrixSource, PartSource, StoredMatrix, StoredPiece
from gpu_worker.quantization.quantization_method import StackMethod
from kernels.linear.forms import DenseWeight, WeightForm
from kernels.moe import ExpertWeights

# By one of these a linear layer is recognised, whichever way its matrix is stored.
_ENDS = ("weight", "qweight", "weight_packed")


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """What a family calls the parts of a mixture, below the name of the layer.

    Where checkpoints of a family differ, because tools rename what they save, there are several names: the first that
    the checkpoint has is meant.

    Attributes:
        router: The module that scores the experts.
        experts: The module that holds them all.
        matrices: An expert's gate, up and down projections, below that module and the expert's number; two, where
            experts have no gates.
        stacked: Tensors `[num_experts, ...]` of the gates and up projections together, and of the down projections.
        is_transposed: Stacked matrices are `[in_features, out_features]`; None is as each one's shape says.
        is_interleaved: In stacked matrices the features of gate and up projection alternate.
        has_interleaved_adapters: They alternate in the stacks that adapters were trained beside, whatever this one has.
        choice_bias: The bias for the choice; None is the router's `e_score_correction_bias`.
        is_choice_bias_row: It is stored as a matrix of one row.
        shared: The module of the expert that all tokens get, which is stored as a plain block is.
        shared_matrices: Its gate, up and down projections below that module; two, where the first two are one, or
            there is no gate.
        shared_gate: The module that weighs its result.
        latent: The modules from the stream to what experts are given, and from what they give back.
    """

    router: Sequence[str] = ("mlp.gate",)
    experts: Sequence[str] = ("mlp.experts",)
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: Sequence[tuple[str, str]] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    is_transposed: bool | None = False
    is_interleaved: bool = False
    has_interleaved_adapters: bool = False
    choice_bias: str | None = None
    is_choice_bias_row: bool = False
    shared: str = "mlp.shared_expert"
    shared_matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str = "mlp.shared_expert_gate"
    latent: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")

    @property
    def pattern(self) -> str:
        """What the names of experts' tensors match, below the name of the layer."""
        stacks = sorted({name for pair in self.stacked for name in pair})
        return "|".join([r".*\bexperts\..*", *(rf"{re.escape(name)}(?:[._].*)?" for name in stacks)])


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of all experts of a mixture.

    Attributes:
        inner_size: Features between the matrices of an expert.
        num_projections: Matrices that yield these, one above the other: two where there is a gate.
    """

    num_experts: int
    inner_size: int
    num_projections: int
    has_biases: bool


def take_experts(
    projections: Projections, names: MixtureNames, layer: str, sizes: ExpertSizes, hidden_size: int
) -> tuple[ExpertWeights, ExpertWeights]:
    """Take the experts of a layer: gates, if they have any, and up projections, then down projections.

    Raises:
        Exception: What the source's `error` makes: a tensor is missing, malformed or not supported.
    """
    inner = sizes.inner_size
    stacks = _ExpertStacks(projections, names.is_transposed, sizes)
    for gate_up, down in ((f"{layer}.{one}", f"{layer}.{other}") for one, other in names.stacked):
        if stacks.has(gate_up):
            rows = sizes.num_projections * inner
            both = stacks.take([gate_up], rows, hidden_size, is_interleaved=names.is_interleaved)
            return both, stacks.take([down], hidden_size, inner)
    modules = [f"{layer}.{name}" for name in names.experts]
    for module in modules:
        *firsts, down = (f"{module}.{name}" for name in names.matrices)
        if stacks.has(firsts[0]):
            return stacks.take(firsts, inner, hidden_size), stacks.take([down], hidden_size, inner)
    module = experts_module(projections, names, layer)
    experts = _OwnTensors(projections, sizes.has_biases, [f"{module}.{expert}" for expert in range(sizes.num_experts)])
    *first_names, down = names.matrices
    return experts.take(first_names, inner, hidden_size), experts.take([down], hidden_size, inner)


def experts_module(projections: Projections, names: MixtureNames, layer: str) -> str:
    """Return the module of a layer whose experts have tensors of their own; the first of its names if none has."""
    has, first = projections.source.has, f"0.{names.matrices[0]}"
    modules = [f"{layer}.{name}" for name in names.experts]
    found = (module for module in modules if any(has(f"{module}.{first}.{end}") for end in _ENDS))
    return next(found, modules[0])


@dataclass(frozen=True, slots=True, eq=False)
class _OwnTensors:
    projections: Projections
    has_bias: bool
    experts: Sequence[str]

    def take(self, parts: Sequence[str], rows: int, columns: int) -> ExpertWeights:
        """Take some matrices of every expert, `[rows, columns]` each, one above the other."""
        if self.projections.quantized is None and not (self.has_bias or self.projections.is_divided):
            return self._dense(parts, rows, columns)
        taken = [
            self.projections.take(
                [f"{expert}.{part}" for part in parts], [rows] * len(parts), columns, has_bias=self.has_bias
            )
            for expert in self.experts
        ]
        biases = [expert.bias for expert in taken if expert.bias is not None]
        return ExpertWeights(tuple(expert.weight for expert in taken), torch.stack(biases) if biases else None)

    def _dense(self, parts: Sequence[str], rows: int, columns: int) -> ExpertWeights:
        tensors = [f"{expert}.{part}.weight" for expert in self.experts for part in parts]
        whole = self.projections.source.take_rows(tensors, [(rows, columns)] * len(tensors))
        return ExpertWeights.dense(whole.view(len(self.experts), len(parts) * rows, columns))


class _ExpertStacks:
    """Tensors `[num_experts, ...]` of one checkpoint."""

    def __init__(self, projections: Projections, is_transposed: bool | None, sizes: ExpertSizes) -> None:
        self._source = projections.source
        self._quantized = projections.quantized
        self._is_divided = projections.is_divided
        self._stored_transposed = is_transposed
        self._sizes = sizes

    def has(self, name: str) -> bool:
        """Whether there is such a stack."""
        return self._source.has(name) or self._source.has(f"{name}.weight") or self._method(name) is not None

    def take(self, names: Sequence[str], rows: int, columns: int, *, is_interleaved: bool = False) -> ExpertWeights:
        """Take the matrices of one or several stacks, those of an expert one above the other.

        Raises:
            Exception: What the source's `error` makes.
        """
        biases = [self._bias(name, rows) for name in names] if self._sizes.has_biases else []
        bias = torch.cat(biases, dim=1) if biases else None
        if bias is not None and is_interleaved:
            bias = torch.cat((bias[:, 0::2], bias[:, 1::2]), dim=1)
        is_transposed = [self._is_transposed(name, rows, columns) for name in names]
        is_whole = len(names) == 1 and not (is_interleaved or is_transposed[0] or self._is_divided)
        if is_whole and self._method(names[0]) is None:
            whole = self._source.take(self._tensor(names[0]), self._sizes.num_experts, rows, columns)
            return ExpertWeights.dense(whole, bias)
        forms = []
        for expert in range(self._sizes.num_experts):
            taken = zip(names, is_transposed, strict=True)
            pieces = [self._item(name, expert, rows, columns, turned) for name, turned in taken]
            order = torch.arange(sum(piece.shape[0] for piece in pieces)).view(-1, 2).T.flatten()
            matrix = StoredMatrix(tuple(pieces), order if is_interleaved else None)
            forms.append(cast("WeightForm", matrix) if self._is_divided else matrix.whole())
        return ExpertWeights(tuple(forms), bias)

    def _item(self, name: str, expert: int, rows: int, columns: int, is_transposed: bool) -> StoredPiece:
        method, count, tensor = self._method(name), self._sizes.num_experts, self._tensor(name)

        def read(shown: MatrixSource, shape: tuple[int, int]) -> WeightForm:
            if method is not None:
                return method.take_item(shown, name, expert, (count, *shape))
            if is_transposed:
                return DenseWeight(shown.take_item(tensor, expert, count, *shape[::-1]).T.contiguous())
            return DenseWeight(shown.take_item(tensor, expert, count, *shape))

        source = cast("PartSource", self._source)
        is_quantized = method is not None
        stored = name if is_quantized else tensor
        return StoredPiece(
            source, stored, (rows, columns), read, expert, is_transposed and not is_quantized, is_quantized
        )

    def _is_transposed(self, name: str, rows: int, columns: int) -> bool:
        is_transposed = self._stored_transposed
        if is_transposed is not None or self._method(name) is not None:
            return bool(is_transposed)
        return self._source.shape(self._tensor(name))[1:] == (columns, rows)

    def _bias(self, name: str, rows: int) -> torch.Tensor:
        tensor = next((name for name in (f"{name}_bias", f"{name}.bias") if self._source.has(name)), f"{name}_bias")
        return self._source.take(tensor, self._sizes.num_experts, rows)

    def _tensor(self, name: str) -> str:
        return f"{name}.weight" if self._source.has(f"{name}.weight") else name

    def _method(self, name: str) -> StackMethod | None:
        if self._quantized is None or not isinstance(method := self._quantized.method, StackMethod):
            return None
        return method if method.has_stack(self._quantized.source, name) else None
