"""A short convolution over time, a filter a channel, that goes on from the last inputs of each sequence."""

from kernels.causal_conv.dispatch import causal_conv

__all__ = ["causal_conv"]
