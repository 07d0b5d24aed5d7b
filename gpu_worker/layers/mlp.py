"""Feed-forward blocks: gated, `down(activation(gate(x)) * up(x))`, and plain, `down(activation(up(x)))`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.layer_source import LayerSource, WeightSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, to_stream
from kernels.activation import Activation, Xielu, activate, gated, gated_rounded
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
            "down": to_stream(f"mlp.{names.down}", hidden_size, inner, has_bias=self.has_bias, scale=self.down_scale),
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


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A feed-forward block `down(activation(up(x)))`; with `has_bias`, both matrices have one.

    `Activation.XIELU` is a function whose numbers are tensors of the layer; where they are known already, it is the
    function itself.
    """

    inner_size: int
    activation: Activation | Xielu
    has_bias: bool = False

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare the projections to the inner features and back."""
        inner, has_bias, is_turned = self.inner_size, self.has_bias, names.is_transposed
        up, down = f"mlp.{names.up}", f"mlp.{names.down}"
        return {
            "up": LinearShape((up,), (inner,), hidden_size, Partition.COLUMN, has_bias, is_transposed=is_turned),
            "down": to_stream(down, hidden_size, inner, has_bias=has_bias, is_transposed=is_turned),
        }

    def take(self, source: LayerSource, prefix: str) -> PlainWeights:
        """Take the weights of the layer `prefix`."""
        linears = source.linears(prefix, self.linears(source.block.names, source.hidden_size))
        activation = self.activation
        if activation is Activation.XIELU:
            activation = _take_xielu(source.checkpoint, f"{prefix}.mlp.act_fn")
        return PlainWeights(linears["up"], linears["down"], activation)


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A feed-forward block without a gate."""

    up: Projection
    down: Projection
    activation: Activation | Xielu

    def block(self, parts: LayerParts) -> PlainMLP:
        """Make the block."""
        return PlainMLP(parts.linear(self.up), parts.linear(self.down), self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class PlainMLP:
    """Two matrices and a nonlinear function between them.

    Source: Vaswani et al., arXiv 1706.03762, equation 2.
    """

    up: Linear
    down: Linear
    activation: Activation | Xielu

    def rounding(self, context: AttentionContext) -> InputRounding | None:
        """Return how its input may be rounded."""
        return self.up.rounding(context)

    def __call__(self, x: Rows, context: AttentionContext) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        return self.down(activate(self.up(x, context), self.activation), context)


def _take_xielu(checkpoint: WeightSource, name: str) -> Xielu:

    def take(part: str, default: float) -> float:
        return checkpoint.take_float32(f"{name}.{part}").item() if checkpoint.has(f"{name}.{part}") else default

    above, below = (checkpoint.take_float32(f"{name}.{part}", 1).item() for part in ("alpha_p", "alpha_n"))
    return Xielu.learned(above, below, take("beta", 0.5), take("eps", -1e-6))
