"""One folder an op: a plain torch reference, kernels for devices where they pay, and a dispatch."""
