"""GPTQ checkpoints: integers of 4 or 8 bits in 32-bit words along the input, one scale and zero point a group.

Source: Frantar et al., arXiv 2210.17323; the layout is AutoGPTQ's. Its first version stores a zero point minus one, its
second ("gptq_v2") the zero point itself. AutoRound ("auto-round"; Cheng et al., arXiv 2309.05516) writes the layout of
GPTQ or of AWQ, which `packing_format` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from gpu_worker.quantization.awq import read_awq
from gpu_worker.quantization.config_fields import QuantizationError, check_choice, compile_pattern, read_fields
from gpu_worker.quantization.quantization_method import QuantizationMethod, TensorSource
from gpu_worker.quantization.stored_tensors import (
    columns_of_a_group,
    group_weight,
    take_exact,
    take_input_order,
    take_scales,
    unpack_words,
)
from kernels.linear.forms import DenseWeight, WeightForm

NAME = "gptq"


class GPTQSettings(msgspec.Struct, frozen=True):
    """How a layer was quantized."""

    bits: int
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True


class _Config(GPTQSettings, frozen=True):
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The settings of layers, and `rules` in order for those whose name matches: None where they were left alone.

    Zero points are stored minus one unless `has_true_zeros`.
    """

    settings: GPTQSettings
    has_true_zeros: bool
    rules: tuple[tuple[re.Pattern[str], GPTQSettings | None], ...] = ()
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Do what `QuantizationMethod` promises. A layer without packed weights was left alone."""
        names = (source.stored_module(name), name)
        meant = (other for pattern, other in self.rules if any(map(pattern.match, names)))
        settings = next(meant, self.settings)
        if settings is None or not source.has(f"{name}.qweight"):
            return DenseWeight(source.take(f"{name}.weight", out_features, in_features))
        bits, per_word = settings.bits, 32 // settings.bits
        if in_features % per_word or out_features % per_word:
            size = f"[{out_features}, {in_features}]"
            raise source.error(f"{name}.qweight", f"is of a layer {size}; both must be multiples of {per_word}")
        group_size = columns_of_a_group(settings.group_size, in_features)
        num_groups = -(-in_features // group_size)
        words = take_exact(source, f"{name}.qweight", torch.int32, (in_features // per_word, out_features))
        stored = take_exact(source, f"{name}.qzeros", torch.int32, (num_groups, out_features // per_word))
        scales = take_scales(source, f"{name}.scales", (num_groups, out_features)).T.contiguous()
        order = None
        if settings.desc_act or source.has(f"{name}.g_idx"):
            order = take_input_order(source, f"{name}.g_idx", in_features, group_size)
        # Words hold neighbours along the input, so that their bytes are what the engine packs.
        values = words.T.contiguous().view(torch.uint8)
        return group_weight(values, bits, group_size, scales, self._zeros(stored, settings), order)

    def _zeros(self, stored: torch.Tensor, settings: GPTQSettings) -> torch.Tensor:
        zeros = unpack_words(stored, settings.bits).T.int()
        # Symmetric zero points are known; some tools store them as they are in files that promise them minus one.
        is_plain = settings.sym and bool((zeros == 1 << (settings.bits - 1)).all())
        return zeros if self.has_true_zeros or is_plain else zeros + 1


def read_gptq(fields: Mapping[str, Any]) -> GPTQ:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    _check(config, "")
    layout = (config.checkpoint_format or config.format or "gptq").lower()
    check_choice("checkpoint_format", layout, ("gptq", "gptq_v2"))
    if config.is_marlin_format:
        raise QuantizationError("is_marlin_format", "is true; supported: weights in the layout of GPTQ")
    rules = tuple(_rule(config, pattern, changes) for pattern, changes in config.dynamic.items())
    return GPTQ(_settings(config), layout == "gptq_v2", rules)


def _settings(config: GPTQSettings) -> GPTQSettings:
    return GPTQSettings(config.bits, config.group_size, config.desc_act, config.sym)


def _rule(config: _Config, text: str, changes: Mapping[str, Any]) -> tuple[re.Pattern[str], GPTQSettings | None]:
    """Read one rule of `dynamic`: "-:" leaves layers alone, "+:" or nothing changes their settings."""
    pattern = compile_pattern("dynamic", text.removeprefix("-:").removeprefix("+:"))
    if text.startswith("-:"):
        return pattern, None
    place = f"dynamic.{text[:80]}"
    settings = read_fields({**msgspec.structs.asdict(_settings(config)), **changes}, GPTQSettings, place)
    _check(settings, f"{place}.")
    return pattern, settings


def _check(settings: GPTQSettings, place: str) -> None:
    check_choice(f"{place}bits", settings.bits, (4, 8))
    size = settings.group_size
    if size != -1 and (size <= 0 or size % 8):
        raise QuantizationError(f"{place}group_size", f"is {size}; supported: -1 (all) and multiples of 8")


AUTO_ROUND = "auto-round"

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# Layers with this many bits are not quantized.
_PLAIN_BITS = 16


class _AutoRoundConfig(msgspec.Struct, frozen=True):
    bits: int
    group_size: int = 128
    sym: bool = True
    data_type: str = "int"
    packing_format: str = _GPTQ
    extra_config: dict[str, dict[str, Any]] = {}


def read_auto_round(fields: Mapping[str, Any]) -> QuantizationMethod:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _AutoRoundConfig)
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
    rules = [
        (re.compile(re.escape(name) + r"\Z"), _own_settings(config, name, changes)) for name, changes in own.items()
    ]
    return GPTQ(method.settings, method.has_true_zeros, tuple(rules))


def _differs(config: _AutoRoundConfig, changes: Mapping[str, Any]) -> bool:
    """Whether a layer is quantized in another way than the rest; one that was left alone is known by its tensors."""
    bits = changes.get("bits", config.bits)
    if not isinstance(bits, int) or bits >= _PLAIN_BITS:
        return False
    settings = (changes.get("group_size", config.group_size), changes.get("sym", config.sym))
    return (bits, *settings) != (config.bits, config.group_size, config.sym)


def _own_settings(config: _AutoRoundConfig, name: str, changes: Mapping[str, Any]) -> GPTQSettings:
    given = {"bits": config.bits, "group_size": config.group_size, "sym": config.sym, **changes}
    try:
        return read_gptq(given).settings
    except QuantizationError as error:
        field = error.field.removeprefix("quantization_config.")
        raise QuantizationError(f"extra_config.{name[:80]}.{field}", error.problem) from None
