"""Quantized weights: the forms that the engine computes with, and one file a method that checkpoints come in."""
