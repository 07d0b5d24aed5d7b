"""Activations in plain torch: the oracle of kernels, and what runs where there is none."""

from __future__ import annotations

from enum import Enum

import torch
from torch.nn import functional


class Activation(Enum):
    """A nonlinear function; the values are the names that checkpoints give it in `hidden_act`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    XIELU = "xielu"
    """Its numbers are each layer's: `Xielu` computes it."""


def activate_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply a function to every number of `x`."""
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.RELU:
            return torch.relu(x)
        case Activation.RELU_SQUARED:
            return torch.relu(x).square_()
        case Activation.XIELU:
            raise ValueError("xIELU has numbers of each layer: call its Xielu")


def gated_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute what `kernels.activation.gated` promises; 16-bit types are rounded once more, after the function."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_reference(gate, activation).mul_(up)
