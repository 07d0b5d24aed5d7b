"""The linear layers of blocks: what each is made of, and how a block calls it.

A block calls its linear layers with the step. Who divides layers among devices, or adds an adapter's product for some
tokens, does so in `Linear`, by what the layer declares; blocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from gpu_worker.layers.adapters import AdapterTargets, ExpertModules, ExpertShare
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.ranks.blocks import ContextAttention, OwnAttention, SpreadNorm
from gpu_worker.layers.ranks.experts import PlacedExperts, SummedExperts
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.stored_matrix import whole
from kernels.activation.experts import ExpertActivation
from kernels.layer_cache import EVERY_TOKEN, CachedTokens
from kernels.linear import Linear as Product
from kernels.linear import LinearFactory, RoundsInputs
from kernels.linear.forms import WeightForm
from kernels.linear.rounding import InputRounding, RoundedRows, Rows
from kernels.low_rank import AdapterTable
from kernels.moe import AdaptableExperts, Experts, ExpertWeights, ReplaceableExperts, make_experts
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm

Attend = Callable[..., torch.Tensor]
"""Attention to cached tokens, which is called as `paged_attention` is."""
VectorNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Normalisation of all heads of a token as one vector, which is called as `rms_norm` is."""


class Partition(Enum):
    """How a linear layer is divided, if a model is."""

    COLUMN = "column"
    """By output features, each of its parts by itself: what follows is computed for some heads or inner features."""
    ROW = "row"
    """By input features: the results are summed."""
    REPLICATED = "replicated"
    """Not at all: all of its results are needed everywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearShape:
    """A linear layer of a block, and the modules of a checkpoint that it is made of.

    Attributes:
        modules: Below the layer, `self_attn.q_proj`. Their features stand one after another.
        rows: Output features of each module.
        order: `[sum(rows)]` int64, which of the modules' features each feature is; None is in order.
        scales: The widths of parts of the modules' features, and what each part is multiplied by; empty is by one.
        is_transposed: Dense matrices are stored `[in_features, out_features]`.
        parts: The widths of parts of the features, in their order here, of which each is divided by itself; empty is
            one part a module.
        is_rounded: Its weights bear being rounded: routers, whose choices are all or nothing, do not.
        is_absorbed: It is multiplied into other matrices, so no adapter can be beside it.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    partition: Partition
    has_bias: bool = False
    order: torch.Tensor | None = None
    scales: tuple[tuple[int, float], ...] = ()
    is_transposed: bool = False
    parts: tuple[int, ...] = ()
    is_rounded: bool = True
    is_absorbed: bool = False

    @property
    def divided_parts(self) -> tuple[int, ...]:
        """The widths of the parts of its features of which each is divided by itself."""
        return self.parts or self.rows


def to_stream(
    module: str, size: int, columns: int, *, has_bias: bool = False, scale: float = 1.0, is_transposed: bool = False
) -> LinearShape:
    """Declare the layer of a block whose output, of `size` features, is added to the stream."""
    scales = ((size, scale),)
    return LinearShape((module,), (size,), columns, Partition.ROW, has_bias, None, scales, is_transposed)


def feature_factors(scales: Sequence[tuple[int, float]]) -> torch.Tensor | None:
    """Return a factor for each feature, of parts of these widths; None where all are one.

    Shapes:
        result: `[sum(widths)]` float32
    """
    if all(scale == 1 for _, scale in scales):
        return None
    widths, factors = zip(*scales, strict=True)
    return torch.tensor(factors).repeat_interleave(torch.tensor(widths))


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix, `[out_features, in_features]`, in whatever form, and an optional bias, `[out_features]`.

    Attributes:
        shape: What a block declares of it; None where no block does.
        inputs: `[in_features]` int64, which input features of all ranks it multiplies, where these are gathered; None
            is those that are here.
        layer: The layer whose block declares it, `model.layers.3`.
        rows: `[out_features]` int64, which of the features of all ranks these are, of a layer that is divided by
            columns; None is all, in their order.
        columns: `[in_features]` int64, which input features it multiplies, of a layer that is divided by rows; None is
            all.
    """

    weight: WeightForm
    bias: torch.Tensor | None = None
    shape: LinearShape | None = None
    inputs: torch.Tensor | None = None
    layer: str = ""
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None


def adapter_tables(
    targets: AdapterTargets | None,
    projection: Projection,
    parts: tuple[int, ...] = (),
    *,
    is_gated: bool = False,
) -> tuple[AdapterTable, ...]:
    """Let adapters be beside a matrix of a block; return a table for each of its parts, or one, or none at all."""
    shape = projection.shape
    if targets is None or shape is None or not projection.layer:
        return ()
    own = {"own_rows": projection.rows, "own_columns": projection.columns}
    return declare_matrix(targets, projection.layer, shape, parts=parts, is_gated=is_gated, **own)


def declare_matrix(
    targets: AdapterTargets, layer: str, shape: LinearShape, **placement: Any
) -> tuple[AdapterTable, ...]:
    """Let adapters be beside a matrix of the layer `layer`; `placement` and the result are those of `add`."""
    modules = tuple(f"{layer}.{module}" for module in shape.modules)
    factors = feature_factors(shape.scales)
    return targets.add(modules, shape.rows, shape.columns, order=shape.order, scales=factors, **placement)


def expert_tables(
    targets: AdapterTargets, modules: ExpertModules, *, is_gated: bool
) -> tuple[list[AdapterTable], list[AdapterTable]]:
    """Let adapters be beside the experts that are here; return the tables of their first and last matrices.

    With `is_gated`, the gate and up projections of an expert are packed together, their rows interleaved.
    """
    targets.experts_per_token = max(targets.experts_per_token, modules.top_k)
    targets.experts[modules.layer] = modules
    *firsts, last = modules.matrices
    inner, count, experts, share = modules.inner_size, len(firsts), modules.experts, modules.share
    here = range(len(experts)) if share is None else share.experts
    rows = None if share is None else share.rows
    columns = None if share is None or share.columns is None else torch.tensor(share.columns)
    gate_ups: list[AdapterTable] = []
    downs: list[AdapterTable] = []
    for number, expert in enumerate(experts):
        is_elsewhere = number not in here
        names = tuple(f"{expert}.{name}" for name in firsts)
        sizes = ((inner,) * count, modules.size)
        gate_ups += targets.add(names, *sizes, is_gated=is_gated, own_rows=rows, is_elsewhere=is_elsewhere)
        sizes = ((modules.size,), inner)
        downs += targets.add((f"{expert}.{last}",), *sizes, own_columns=columns, is_elsewhere=is_elsewhere)
    return gate_ups, downs


def declare_experts(targets: AdapterTargets, modules: ExpertModules) -> None:
    """Let adapters be beside experts that another stage has, where they can be beside any on the device."""
    if targets.can_adapt_experts:
        nothing = ExpertShare(len(modules.experts), (), range(0))
        expert_tables(targets, replace(modules, share=nothing), is_gated=False)
    else:
        targets.experts[modules.layer] = None


class Linear:
    """A linear layer of a block: `x @ weight.T + bias`, and what the adapters of rows add."""

    def __init__(
        self,
        product: Product,
        shape: LinearShape | None = None,
        ranks: Ranks = ALONE,
        inputs: torch.Tensor | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._adapters = adapters
        self._product = product
        self.shape = shape
        is_summed = ranks.size > 1 and shape is not None and shape.partition is Partition.ROW
        self._ranks = ranks if is_summed else None
        self._inputs = inputs
        # Inputs that are gathered from all ranks are rounded behind that.
        self.input_rounding = product.rounding if inputs is None and isinstance(product, RoundsInputs) else None

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how the producer of the inputs may round them; None if they are wanted unrounded."""
        return self.input_rounding if context.may_round else None

    def __call__(self, x: Rows, context: AttentionContext) -> torch.Tensor:
        """Return `[num_tokens, out_features]` for the step's tokens, `[num_tokens, in_features]`, or rounded ones."""
        if isinstance(x, RoundedRows):
            assert isinstance(self._product, RoundsInputs), "rows are rounded for products that say how"
            result = self._product(x)
            return result if self._ranks is None else self._ranks.sum(result)
        if context.observer is not None and self.shape is not None:
            context.observer(self.shape.modules, x)
        if self._inputs is not None and self._ranks is not None:
            x = self._ranks.gather(x).index_select(1, self._inputs)
        result = self._product(x)
        if context.adapters is not None and self._adapters is not None:
            self._adapters.add(x, result, context.adapters)
        return result if self._ranks is None else self._ranks.sum(result)

    def to_float32(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Do the same, in float32, not rounded to the type of `x` where the form of the weights allows it."""
        if context.observer is not None and self.shape is not None:
            context.observer(self.shape.modules, x)
        assert self._ranks is None, "no layer that is divided by rows is asked for float32"
        result = self._product.to_float32(x)
        if context.adapters is not None and self._adapters is not None:
            self._adapters.add(x, result, context.adapters)
        return result


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What the blocks of layers are made with; `placed` are the experts made so far that move between ranks."""

    linears: LinearFactory
    experts: Callable[[ExpertWeights, ExpertWeights, ExpertActivation, ExpertModules | None], Experts]
    rotations: Rotations
    ranks: Ranks = ALONE
    adapters: AdapterTargets | None = None
    placed: Sequence[PlacedExperts] = ()

    @classmethod
    def made_by(
        cls, linears: LinearFactory, rotations: Rotations, ranks: Ranks = ALONE, adapters: AdapterTargets | None = None
    ) -> LayerParts:
        """Make the fastest forms of matrices and experts, by `linears`."""

        def experts(
            gate_up: ExpertWeights, down: ExpertWeights, activation: ExpertActivation, modules: ExpertModules | None
        ) -> Experts:
            share = None if modules is None else modules.share
            first, num_places = (0, None) if share is None else (share.own.start, len(share.places))
            made = make_experts(linears, gate_up, down, activation, first, num_places)
            if adapters is not None and modules is not None:
                if isinstance(made, AdaptableExperts):
                    made.have_adapters(*expert_tables(adapters, modules, is_gated=made.packs_gates))
                else:
                    adapters.experts[modules.layer] = None
            if share is None:
                return made
            if share.stored is None:
                return SummedExperts(made, ranks, share.num_experts)
            assert isinstance(made, ReplaceableExperts)
            placed.append(PlacedExperts(made, ranks, share))
            return placed[-1]

        placed: list[PlacedExperts] = []
        return cls(linears, experts, rotations, ranks, adapters, placed)

    @property
    def cached_tokens(self) -> CachedTokens:
        """Which tokens the caches keep."""
        return self.ranks.tokens

    def attention(self) -> Attend:
        """Make what attends to cached tokens, as `paged_attention` does."""
        return paged_attention if self.cached_tokens == EVERY_TOKEN else ContextAttention(self.ranks)

    def vector_norm(self) -> VectorNorm:
        """Make the normalisation of vectors that are normalised as a whole."""
        return rms_norm if self.ranks.size == 1 else SpreadNorm(self.ranks)

    def mixer(self, weights: Any, index: int) -> Any:
        """Make the block of a layer that mixes tokens: of all sequences, or of this rank's own."""
        if not self.ranks.divides_sequences:
            return weights.block(self, index)
        return OwnAttention(weights.block(replace(self, ranks=ALONE), index), self.ranks)

    def linear(self, projection: Projection) -> Linear:
        """Make a linear layer of a block."""
        tables = adapter_tables(self.adapters, projection)
        table = tables[0] if tables else None
        return Linear(self.product(projection), projection.shape, self.ranks, projection.inputs, table)

    def product(self, projection: Projection) -> Product:
        """Make the product of a matrix that belongs to no block."""
        return self.linears.make(whole(projection.weight), projection.bias)
