"""The engine without torch: sequences, blocks, prefix cache, scheduler. Imports neither torch nor NATS."""
