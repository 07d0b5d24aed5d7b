"""What the experts of a layer promise, and those that are made of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from kernels.activation.experts import ExpertActivation, GatedActivation
from kernels.cpu_library import cpu_library
from kernels.gpu_config import gpu_of, has_float8, has_kernels
from kernels.linear import Linear, LinearFactory
from kernels.low_rank import AdapterRows, AdapterTable
from kernels.moe.cpu import CpuExperts, layout_of, pack_experts
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.stacks import stack_experts


class Experts(Protocol):
    """The experts of a layer that are on this device."""

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens each expert here got since it was made: `[num_experts]` int64, on the device."""

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: AdapterRows | None = None
    ) -> torch.Tensor:
        """Return the sum over a token's experts of weight times `down(activation(gate_up(x)))`, in the type of `x`.

        `adapters` are those of the tokens, with room for `top_k` experts each. Experts that are not here contribute
        nothing and are not counted: those elsewhere, and ids below zero.

        Shapes:
            x, result: `[num_tokens, hidden_size]`
            ids: `[num_tokens, top_k]` int32; those of a token differ.
            weights: `[num_tokens, top_k]` float32
        """


@runtime_checkable
class ReplaceableExperts(Experts, Protocol):
    """Experts of which one can take the place of another between two calls."""

    def prepare(self, gate_up: ExpertWeights, down: ExpertWeights) -> Any:
        """Lay one expert out as it is computed; any thread may do so.

        Raises:
            ValueError: Its weights have another form than those here.
        """

    def replace(self, place: int, prepared: Any) -> None:
        """Put a prepared expert in a place among those here."""


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The two projections of an expert."""

    gate_up: Linear
    down: Linear


@runtime_checkable
class AdaptableExperts(Experts, Protocol):
    """Experts that adapters can be beside.

    Attributes:
        packs_gates: Whether the gate and up projections of an expert are packed together, their rows interleaved.
            Adapters beside them are packed the same way.
    """

    packs_gates: bool

    def have_adapters(self, gate_up: Sequence[AdapterTable], down: Sequence[AdapterTable]) -> None:
        """Let adapters be beside the two matrices of each expert here, by these tables."""


class LinearExperts:
    """Experts one after another, by linear layers: on CPUs, where there is no kernel for all at once.

    It asks the device which experts have tokens, so steps with it cannot be captured.
    """

    packs_gates = False

    def __init__(
        self,
        layers: Sequence[ExpertLayers],
        activation: ExpertActivation,
        first_expert: int,
        device: torch.device,
        factory: LinearFactory | None = None,
    ) -> None:
        """Take experts; with a `factory`, others may take their places."""
        self._layers = list(layers)
        self._activation = activation
        self._first_expert = first_expert
        self._factory = factory
        self.tokens_per_expert = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._tables: tuple[Sequence[AdapterTable], Sequence[AdapterTable]] | None = None

    def have_adapters(self, gate_up: Sequence[AdapterTable], down: Sequence[AdapterTable]) -> None:
        """Do what `AdaptableExperts` promises."""
        self._tables = gate_up, down

    def prepare(self, gate_up: ExpertWeights, down: ExpertWeights) -> ExpertLayers:
        """Do what `ReplaceableExperts` promises."""
        assert self._factory is not None
        (layers,) = _make_layers(self._factory, gate_up, down)
        return layers

    def replace(self, place: int, prepared: ExpertLayers) -> None:
        """Do what `ReplaceableExperts` promises."""
        self._layers[place] = prepared

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapters: AdapterRows | None = None
    ) -> torch.Tensor:
        """Multiply the tokens of each expert that has any."""
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        local = ids.long() - self._first_expert
        is_here = (local >= 0) & (local < len(self._layers))
        counts = torch.bincount(local[is_here], minlength=len(self._layers))
        self.tokens_per_expert += counts
        for expert in counts.nonzero()[:, 0].tolist():
            tokens, places = torch.where(local == expert)
            layers = self._layers[expert]
            own = None if adapters is None or self._tables is None else adapters.of(tokens.cpu().numpy())
            both = layers.gate_up.to_float32(x[tokens])
            if own is not None and self._tables is not None:
                self._tables[0][expert].add(x[tokens], both, own)
            hidden = self._activation(both).to(x.dtype)
            outputs = layers.down.to_float32(hidden)
            if own is not None and self._tables is not None:
                self._tables[1][expert].add(hidden, outputs, own)
            result.index_add_(0, tokens, outputs * weights[tokens, places, None])
        return result.to(x.dtype)


def make_experts(
    factory: LinearFactory,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: ExpertActivation,
    first_expert: int = 0,
    num_places: int | None = None,
) -> Experts:
    """Make the experts of a layer; the plain weights can be freed afterwards.

    Args:
        factory: Makes linear layers of experts that no kernel takes together.
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]`; the gates' features come before the up
            projection's, which are alone where the activation has no gate.
        down: `[num_experts, hidden_size, intermediate_size]`.
        activation: Of all experts.
        first_expert: The number of the first of these experts among all, as routing counts them.
        num_places: All experts, by which the rows of each are estimated; None is these alone.
    """
    is_gated = isinstance(activation, GatedActivation)
    layouts = layout_of(gate_up), layout_of(down)
    if None not in layouts and (library := cpu_library()) is not None:
        packed = (pack_experts(library, gate_up, is_gated=is_gated), pack_experts(library, down, is_gated=False))
        return CpuExperts(library, *packed, activation, first_expert, layouts)
    if has_kernels(gate_up.device):
        from kernels.moe.gpu import GpuExperts

        dtype, device = factory.dtype, gate_up.device
        return GpuExperts(
            stack_experts(gate_up, is_gated=is_gated, dtype=dtype),
            stack_experts(down, is_gated=False, dtype=dtype),
            activation,
            first_expert,
            gpu_of(device),
            has_float8=has_float8(device),
            num_places=num_places,
            dtype=dtype,
        )
    return LinearExperts(_make_layers(factory, gate_up, down), activation, first_expert, gate_up.device, factory)


def _make_layers(factory: LinearFactory, gate_up: ExpertWeights, down: ExpertWeights) -> list[ExpertLayers]:
    firsts, lasts = (
        [factory.make(form, weights.bias_of(expert)) for expert, form in enumerate(weights.forms)]
        for weights in (gate_up, down)
    )
    return [ExpertLayers(*both) for both in zip(firsts, lasts, strict=True)]
