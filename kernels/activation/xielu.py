"""xIELU: a parabola above zero, below it a line that an exponential bends, by numbers that each layer has learned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.activation.cpu import SIGMOID, activation_cpu, can_run
from kernels.cpu_library import cpu_library


@dataclass(frozen=True, slots=True)
class Xielu:
    """The function of one layer.

    `positive x^2 + linear x` above zero, and `negative (exp(min(x, limit)) - 1 - x) + linear x` below.

    Source: Huang, "Deriving Activation Functions Using Integration", arXiv 2411.13010, equation 6; `limit` is of the
    authors' code.
    """

    positive: float
    negative: float
    linear: float
    limit: float

    @classmethod
    def learned(cls, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Xielu:
        """Return the function of the numbers that checkpoints have: of the first two, softplus keeps what is meant."""
        above, below = (torch.nn.functional.softplus(torch.tensor(alpha)).item() for alpha in (alpha_p, alpha_n))
        return cls(above, beta + below, beta, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the function of every number of `x`, computed in float32 and rounded once.

        On a CPU a row's bits do not depend on the rows beside it.
        """
        wide = x.float()
        falling = (_expm1(wide.clamp(max=self.limit)) - wide) * self.negative
        bent = torch.where(wide > 0, wide * wide * self.positive, falling)
        return (bent + wide * self.linear).to(x.dtype)


def _expm1(x: torch.Tensor) -> torch.Tensor:
    """Return `exp(x) - 1` of numbers below zero.

    With compiled kernels by `s = 1 / (1 + exp(-x))`, as `(2 s - 1) / (1 - s)`, to 3e-7: torch's own exponential rounds
    by where a number lies among those of the step.
    """
    if can_run(x) and (library := cpu_library()) is not None:
        sigmoid = activation_cpu(library, x, SIGMOID)
        return (2 * sigmoid - 1) / (1 - sigmoid)
    return torch.expm1(x)
