"""The engine's torch-free heart: sequences, blocks, prefix cache, scheduler. Imports neither torch nor NATS."""
