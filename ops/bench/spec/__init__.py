"""Speculative decoding beside plain decoding: `python -m ops.bench.spec`."""
