"""The kernels on a GPU: first whether they are right, then how far from the ceiling, and from the best peer, they are.

`python -m ops.bench.gpu` needs torch and triton only, and takes less than ten minutes; `--only sampling` runs a part.
Every fraction is of a ceiling that the same run measured, every ratio to a baseline of the same run.
"""
