"""AutoRound checkpoints (`quant_method` "auto-round"): integers in the layout of GPTQ or AWQ, whichever is said.

Source: Cheng et al., arXiv 2309.05516; the layouts are named in `packing_format`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gpu_worker.quantization.awq import read_awq
from gpu_worker.quantization.config_fields import QuantizationError, check_choice, read_fields
from gpu_worker.quantization.gptq import GPTQ, GPTQSettings, read_gptq
from gpu_worker.quantization.quantization_method import QuantizationMethod

NAME = "auto-round"

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# Layers with this many bits are not quantized.
_PLAIN_BITS = 16


class _Config(msgspec.Struct, frozen=True):
    bits: int
    group_size: int = 128
    sym: bool = True
    data_type: str = "int"
    packing_format: str = _GPTQ
    extra_config: dict[str, dict[str, Any]] = {}


def read_auto_round(fields: Mapping[str, Any]) -> QuantizationMethod:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    check_choice("packing_format", config.packing_format, (_GPTQ, _AWQ))
    check_choice("data_type", config.data_type, ("int",))
    own = {name: changes for name, changes in config.extra_config.items() if _differs(config, changes)}
    if config.packing_format == _AWQ:
        if own:
            name = next(iter(own))
            problem = f"is quantized in another way than the rest; with {_AWQ!r} layers are so, or left alone (16 bits)"
            raise QuantizationError(f"extra_config.{name[:80]}", problem)
        return read_awq({"bits": config.bits, "group_size": config.group_size})
    method = read_gptq({"bits": config.bits, "group_size": config.group_size, "sym": config.sym})
    rules = [(re.compile(re.escape(name) + r"\Z"), _settings(config, name, changes)) for name, changes in own.items()]
    return GPTQ(method.settings, method.has_true_zeros, tuple(rules))


def _differs(config: _Config, changes: Mapping[str, Any]) -> bool:
    """Whether a layer is quantized in another way than the rest; one that was left alone is known by its tensors."""
    bits = changes.get("bits", config.bits)
    if not isinstance(bits, int) or bits >= _PLAIN_BITS:
        return False
    settings = (changes.get("group_size", config.group_size), changes.get("sym", config.sym))
    return (bits, *settings) != (config.bits, config.group_size, config.sym)


def _settings(config: _Config, name: str, changes: Mapping[str, Any]) -> GPTQSettings:
    given = {"bits": config.bits, "group_size": config.group_size, "sym": config.sym, **changes}
    try:
        return read_gptq(given).settings
    except QuantizationError as error:
        field = error.field.removeprefix("quantization_config.")
        raise QuantizationError(f"extra_config.{name[:80]}.{field}", error.problem) from None
