"""Makes quantized checkpoints in the public conventions of each method: `headrace quantize`."""
