"""GGUF files: their parser, their tensor types in the engine's weight forms, and their tensors under our names."""
