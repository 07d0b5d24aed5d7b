"""Where we stand, written from what the benchmarks recorded: `python -m ops.bench.report`."""
