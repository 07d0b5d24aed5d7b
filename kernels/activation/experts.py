"""The functions of experts: all with a gate as one formula with four numbers, and that of experts without one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

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
    """

    num_projections: ClassVar[int] = 2
    """How many matrices, one above the other, yield what it takes."""
    slope: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    up_shift: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply it to rows `[num_rows, 2 * size]` of gates, then up projections, in their type: `[num_rows, size]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * (self.slope + self.cubic * gate * gate)) * (up + self.up_shift)


@dataclass(frozen=True, slots=True)
class SquaredRelu:
    """What the one projection of an expert without a gate becomes: the square of its positive part.

    Source: So et al., arXiv 2109.08668, section 4.
    """

    num_projections: ClassVar[int] = 1

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """Apply it to rows `[num_rows, size]`, in their type."""
        return torch.relu(up).square()


ExpertActivation = GatedActivation | SquaredRelu

_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)

SILU = GatedActivation()
"""Of SwiGLU; Source: Shazeer, arXiv 2002.05202, equation 6."""
GELU_TANH = GatedActivation(slope=_TANH_SLOPE, cubic=_TANH_SLOPE * 0.044715)
"""Of GEGLU, in the approximation of Hendrycks and Gimpel, arXiv 1606.08415, section 2."""

RELU_SQUARED = SquaredRelu()
"""Of experts without gates."""


def clamped_swiglu(alpha: float, limit: float) -> GatedActivation:
    """Return the activation of gpt-oss: SiLU with another slope, of clamped numbers, times one more than `up`."""
    return GatedActivation(slope=alpha, limit=limit, up_shift=1.0)


def kernel_numbers(activation: ExpertActivation | None) -> tuple[float, float, float, float]:
    """Return the four numbers of a gated activation; where there is no gate, zeros, which kernels do not read."""
    if not isinstance(activation, GatedActivation):
        return (0.0, 0.0, 0.0, 0.0)
    return (activation.slope, activation.cubic, activation.limit, activation.up_shift)
