"""Golden prompts: which ones, and how a baseline is recorded from a system that is right."""
