"""Where memory goes: the KV cache, its budget, and what a step takes."""
