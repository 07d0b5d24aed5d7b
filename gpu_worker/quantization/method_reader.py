"""Chooses the quantization method that a model's `config.json` names.

To add a method, write a file with `NAME` and a function that reads its configuration, and list it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_worker.quantization import awq, compressed_tensors, fp8, gptq, mxfp4
from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError
from gpu_worker.quantization.quantization_method import QuantizationMethod

METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationMethod]] = {
    gptq.NAME: gptq.read_gptq,
    awq.NAME: awq.read_awq,
    fp8.NAME: fp8.read_fp8,
    compressed_tensors.NAME: compressed_tensors.read_compressed_tensors,
    mxfp4.NAME: mxfp4.read_mxfp4,
    fp8.MODELOPT: fp8.read_modelopt,
    gptq.AUTO_ROUND: gptq.read_auto_round,
}


def read_method(config: Mapping[str, Any]) -> QuantizationMethod | None:
    """Read `quantization_config` from a `config.json`, None where there is none; may raise `QuantizationError`."""
    fields = config.get("quantization_config")
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise QuantizationError("", f"is {str(fields)[:80]!r}; it must be an object")
    name = str(fields.get("quant_method"))
    if name not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise QuantizationError("quant_method", f"is {name[:80]!r}; supported: {known}; {OTHER_FORMS}")
    return METHODS[name](fields)
