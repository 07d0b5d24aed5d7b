"""Running a model on a device: paged KV cache, model runner, sampler, and the simulated runner (no torch)."""
