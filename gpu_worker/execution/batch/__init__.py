"""The rows of the running batch, what a step uploads of them, and the captured graphs that replay it."""
