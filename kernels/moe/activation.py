"""The activations of gated experts, as one formula with four numbers, so that kernels have no cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """What the gate and the up projection of an expert become.

    `gate * sigmoid(slope * gate + cubic * gate**3) * (up + up_shift)`, of a gate that is at most `limit` and an up
    projection that is at most `limit` in magnitude.

    Attributes:
        slope: 1 is SiLU's.
        cubic: 0 but for the tanh form of GELU, of which `1 + tanh(y) == 2 * sigmoid(2 * y)` makes a sigmoid.
        limit: Infinite where nothing is clamped.
        up_shift: Added to the up projection.
        has_gate: Without gates all this means nothing: the up projection becomes the square of its positive part.
    """

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    up_shift: float = 0.0
    has_gate: bool = True

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply it to rows of gates, then up projections, in their type.

        Shapes:
            gate_up: `[num_rows, 2 * size]`, or `[num_rows, size]` without gates
            result: `[num_rows, size]`
        """
        if not self.has_gate:
            return torch.relu(gate_up).square()
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * (self.slope + self.cubic * gate * gate)) * (up + self.up_shift)

    @property
    def num_projections(self) -> int:
        """How many matrices, one above the other, yield what it takes."""
        return 2 if self.has_gate else 1


_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)

SILU = GatedActivation()
"""Of SwiGLU; Source: Shazeer, arXiv 2002.05202, equation 6."""
GELU_TANH = GatedActivation(slope=_TANH_SLOPE, cubic=_TANH_SLOPE * 0.044715)
"""Of GEGLU, in the approximation of Hendrycks and Gimpel, arXiv 1606.08415, section 2."""

RELU_SQUARED = GatedActivation(has_gate=False)
"""Of experts without gates; Source: So et al., arXiv 2109.08668, section 4."""


def clamped_swiglu(alpha: float, limit: float) -> GatedActivation:
    """Return the activation of gpt-oss: SiLU with another slope, of clamped numbers, times one more than `up`."""
    return GatedActivation(slope=alpha, limit=limit, up_shift=1.0)
