"""Quantized models beside the same model in bfloat16: `python -m ops.bench.quant`."""
