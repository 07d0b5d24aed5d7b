"""The kernels and whole steps on a GPU: first whether they are right, then how far from the ceiling and the peers.

`python -m ops.bench.gpu` takes less than ten minutes; `--only sampling` runs a part. The kernels need torch and triton
only, whole steps what the engine needs, and transformers. Every fraction is of a ceiling that the same run measured,
every ratio to a baseline of the same run. METHOD.md says how.
"""
