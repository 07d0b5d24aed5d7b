"""Compares launches of the kernels on a device: `python -m ops.bench.gpu.tune`.

There is no tuner at run time: who likes an entry better writes it into its table, for all machines of a generation.
"""
