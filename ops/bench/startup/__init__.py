"""How long the engine takes to start: `python -m ops.bench.startup`."""
