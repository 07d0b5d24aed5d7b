"""Layers that predict the next hidden vector: what EAGLE and the heads of checkpoints share."""
