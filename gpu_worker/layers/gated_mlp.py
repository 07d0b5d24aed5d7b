"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection
from kernels.activation import Activation, gated, gated_rounded
from kernels.linear.rounding import InputRounding, Rows


@dataclass(frozen=True, slots=True)
class GatedShape:
    """A feed-forward block `down(activation(gate(x)) * up(x))`; with `has_bias`, all three matrices have one.

    What the gate's projection yields is multiplied by `gate_scale`, and what the block yields by `down_scale`.
    """

    inner_size: int
    activation: Activation = Activation.SILU
    has_bias: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to the gate and the inner features, and back."""
        inner = self.inner_size
        modules = tuple(f"mlp.{module}" for module in names.gate_up)
        return {
            "gate_up": LinearShape(
                modules,
                (inner, inner) if len(modules) == 2 else (2 * inner,),
                hidden_size,
                Partition.COLUMN,
                has_bias=self.has_bias,
                scales=((inner, self.gate_scale), (inner, 1.0)),
                parts=(inner, inner),
            ),
            "down": LinearShape(
                (f"mlp.{names.down}",),
                (hidden_size,),
                inner,
                Partition.ROW,
                has_bias=self.has_bias,
                scales=((hidden_size, self.down_scale),),
            ),
        }

    def take(self, source: LayerSource, prefix: str) -> GatedWeights:
        """Take the weights of the layer `prefix`."""
        linears = source.linears(prefix, self.linears(source.block.names, source.hidden_size))
        return GatedWeights(linears["gate_up"], linears["down"], self.activation)


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated feed-forward block; `gate_up` yields the gate's features, then the up projection's."""

    gate_up: Projection
    down: Projection
    activation: Activation = Activation.SILU

    def block(self, parts: LayerParts) -> GatedMLP:
        """Make the block."""
        return GatedMLP(parts.linear(self.gate_up), parts.linear(self.down), self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """A gated block whose gate and up projections are one multiplication.

    Source: Shazeer, arXiv 2002.05202, equation 6.
    """

    gate_up: Linear
    down: Linear
    activation: Activation = Activation.SILU

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how its input may be rounded."""
        return self.gate_up.rounding(context)

    def __call__(self, x: Rows, context: AttentionContext) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        gate_up, rounding = self.gate_up(x, context), self.down.rounding(context)
        if rounding is None:
            return self.down(gated(gate_up, self.activation), context)
        return self.down(gated_rounded(gate_up, self.activation, rounding), context)
