"""The nonlinear functions of feed-forward blocks and gates: of a gate times other features, or of features alone."""

from kernels.activation.dispatch import activate, gated, gated_rounded, times_sigmoid
from kernels.activation.reference import Activation
from kernels.activation.xielu import Xielu

__all__ = ["Activation", "Xielu", "activate", "gated", "gated_rounded", "times_sigmoid"]
