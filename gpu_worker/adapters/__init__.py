"""Reads adapters (LoRA) as PEFT stores them, for the model that is loaded."""
