"""Regenerates the kernels' launch tables on a device: `python -m ops.bench.gpu.tune`.

There is no tuner at run time: what is written here is read in review, and is the same on every machine.
"""
