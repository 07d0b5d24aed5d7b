"""Attention and a state space model side by side, in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention import Attention, AttentionShape, AttentionWeights
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.cache_layout import KeepsBoth, KeepsState, LayerMemory, LayerState
from gpu_worker.layers.encoder import BidirectionalAttention
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, LinearShape
from gpu_worker.layers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class AttentionBesideMamba2Shape:
    """Both mixers of the same vectors, whose results are added."""

    attention: AttentionShape
    mamba2: Mamba2Shape

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections of both."""
        attention, mamba2 = self.attention.linears(names, hidden_size), self.mamba2.linears(names, hidden_size)
        rooms = {"attention": attention, "mamba2": mamba2}
        return {f"{room}.{name}": linear for room, linears in rooms.items() for name, linear in linears.items()}

    def memory(self) -> LayerMemory:
        """Describe what the layer keeps: keys and values, and a state."""
        state = self.mamba2.memory()
        assert isinstance(state, KeepsState)
        return KeepsBoth(self.attention.kept_tokens(), state)

    def take(self, source: LayerSource, prefix: str) -> AttentionBesideMamba2Weights:
        """Take the weights of the layer `prefix`."""
        return AttentionBesideMamba2Weights(self.attention.take(source, prefix), self.mamba2.take(source, prefix))


@dataclass(frozen=True, slots=True)
class AttentionBesideMamba2Weights:
    """Both mixers of the same vectors."""

    attention: AttentionWeights
    mamba2: Mamba2Weights

    def block(self, parts: LayerParts, index: int) -> AttentionBesideMamba2:
        """Make the block; `index` is the layer's number, by which it finds its cache and its state."""
        return AttentionBesideMamba2(self.attention.block(parts, index), self.mamba2.block(parts, index))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBesideMamba2:
    """Attention and a state space model, which read the same vectors and whose results are added.

    Source: Zuo et al., Falcon-H1, arXiv 2507.22448, section 2.1.
    """

    attention: Attention | BidirectionalAttention
    mamba2: Mamba2

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Return the sum of what both make of `x: [num_tokens, hidden_size]`."""
        return self.attention(x, positions, context) + self.mamba2(x, positions, context)

    def replay(self, inputs: torch.Tensor, state: LayerState, rows: StateRows) -> None:
        """Take states through tokens that were computed before: keys and values have places of their own."""
        self.mamba2.replay(inputs, state, rows)
