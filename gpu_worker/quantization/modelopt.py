"""Checkpoints of NVIDIA's Model Optimizer (`quant_method` "modelopt"): float8 matrices, a scale each and one of inputs.

Source: the tensors and configurations that the tool writes, and vLLM's documentation of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError, read_fields
from gpu_worker.quantization.fp8 import FP8

NAME = "modelopt"

OWN_FILE = "hf_quant_config.json"
"""Where checkpoints have the configuration whose `config.json` has none: in its field `quantization`."""


class _Config(msgspec.Struct, frozen=True):
    quant_algo: str


def read_modelopt(fields: Mapping[str, Any]) -> FP8:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    if config.quant_algo.upper() != "FP8":
        raise QuantizationError("quant_algo", f"is {config.quant_algo[:80]!r}; supported: 'FP8'; {OTHER_FORMS}")
    return FP8(is_static=True, has_blocks=False)
