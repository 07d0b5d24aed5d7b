"""Benchmarks: the gateway, the scheduler, the engine on a CPU, the kernels on a GPU."""
