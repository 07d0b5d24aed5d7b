"""EAGLE: a layer that predicts the next hidden vector, from which the model's head or its own reads tokens."""
