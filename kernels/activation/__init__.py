"""The nonlinear functions of feed-forward blocks and gates: of a gate times other features, or of features alone."""

from kernels.activation.dispatch import Xielu, activate, gated, gated_rounded, times_sigmoid
from kernels.activation.reference import Activation

__all__ = ["Activation", "Xielu", "activate", "gated", "gated_rounded", "times_sigmoid"]
