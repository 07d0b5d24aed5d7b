"""Checkpoints with quantized weights, one file a method: read into the forms of `kernels.linear.forms`."""
