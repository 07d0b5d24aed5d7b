"""EAGLE: a layer that predicts the next hidden vector, and proposes tokens by it."""
