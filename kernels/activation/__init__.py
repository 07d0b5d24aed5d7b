"""The nonlinear functions of feed-forward blocks: of a gate times other features, or of features alone."""

from kernels.activation.dispatch import activate, gated
from kernels.activation.kind import Activation

__all__ = ["Activation", "activate", "gated"]
