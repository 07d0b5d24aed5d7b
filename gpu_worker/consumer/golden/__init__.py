"""Golden probes: a worker finds out by itself that its answers are no longer those of its model, and withdraws."""
