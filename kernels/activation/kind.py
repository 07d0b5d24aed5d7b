"""Which nonlinear functions there are."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    """A nonlinear function; the values are the names that checkpoints give it in `hidden_act`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    XIELU = "xielu"
    """Its numbers are each layer's: `Xielu` computes it."""
