"""Chooses the implementation of an activation for the tensors at hand."""

from __future__ import annotations

import torch

from kernels.activation.kind import Activation
from kernels.activation.reference import activate_reference, gated_reference
from kernels.silu_mul import silu_mul


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` for rows that hold the gate's features, then the up projection's.

    Source: Shazeer, arXiv 2002.05202, section 2.

    Args:
        gate_up: Contiguous.
        activation: Which function.

    Shapes:
        gate_up: `[num_tokens, 2 * size]`
        result: `[num_tokens, size]`
    """
    if activation is Activation.SILU:
        return silu_mul(gate_up)
    return gated_reference(gate_up, activation)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the function of every number of `x`, which has any shape."""
    return activate_reference(x, activation)
