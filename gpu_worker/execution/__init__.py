"""One step on a device: the runner, its batch, sampling, drafts and memory; and the simulated runner (no torch)."""
