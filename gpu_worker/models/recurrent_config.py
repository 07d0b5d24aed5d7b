"""Reads the sizes and options of Mamba-2 mixers, and puts recurrent mixers into layers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpu_worker.layers.layer import LayerTraits, MixerShape
from gpu_worker.layers.mamba2 import Mamba2Shape, OutputNorm
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from kernels.ssd import SsdSizes

MAX_CONV_WIDTH = 16
"""The most tokens that a convolution of a recurrent layer may span."""

_LIMITS = "time_step_limit"
_MAX_STATE = 256
_MAX_HEADS = 1 << 12


@dataclass(frozen=True, slots=True)
class Mamba2Fields:
    """What a family calls the fields of its mixers; by default as Bamba does.

    `inner_size`, or else `expand` times the stream's size, is the values of a token; without both, what all heads
    have.
    """

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    conv_width: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    inner_size: str | None = None
    expand: str | None = "mamba_expand"
    input_bias: str = "mamba_proj_bias"
    output_bias: str = "mamba_proj_bias"
    activation: str = "hidden_act"


def read_mamba2(
    file: JsonFile, fields: Mamba2Fields = Mamba2Fields(), norm: OutputNorm = OutputNorm.AFTER_GATE
) -> Mamba2Shape:
    """Read a Mamba-2 mixer."""
    activation = file.text(fields.activation, "silu")
    if activation not in ("silu", "swish"):
        problem = f"is {activation[:80]!r}; the convolutions of Mamba-2 are served with 'silu'"
        raise file.error(fields.activation, problem)
    return Mamba2Shape(
        _read_sizes(file, fields),
        file.integer(fields.conv_width, 4, minimum=2, maximum=MAX_CONV_WIDTH),
        norm,
        _read_limits(file),
        has_conv_bias=file.boolean(fields.conv_bias, True),
        has_input_bias=file.boolean(fields.input_bias, False),
        has_output_bias=file.boolean(fields.output_bias, False),
    )


def _read_sizes(file: JsonFile, fields: Mamba2Fields) -> SsdSizes:
    num_heads = file.integer(fields.num_heads, 128, maximum=_MAX_HEADS)
    num_groups = file.integer(fields.num_groups, 1, maximum=_MAX_HEADS)
    if num_heads % num_groups:
        raise file.error(fields.num_groups, f"is {num_groups}; it must divide {fields.num_heads} ({num_heads})")
    inner_size = _inner_size(file, fields)
    if inner_size is not None and file.fields.get(fields.head_dim) in (None, "auto"):
        head_dim = max(1, inner_size // num_heads)
    else:
        head_dim = file.integer(fields.head_dim, 64, maximum=1024)
    if inner_size not in (None, head_dim * num_heads):
        problem = f"times {fields.num_heads} is {head_dim} * {num_heads}; it must be the inner size, {inner_size}"
        raise file.error(fields.head_dim, problem)
    return SsdSizes(num_heads, head_dim, num_groups, file.integer(fields.state_size, maximum=_MAX_STATE))


def _inner_size(file: JsonFile, fields: Mamba2Fields) -> int | None:
    """Return the values of a token, where a field says how many."""
    if fields.inner_size is not None and fields.inner_size in file.names():
        return file.integer(fields.inner_size)
    return None if fields.expand is None else file.integer(fields.expand, 2, maximum=64) * file.integer("hidden_size")


def _read_limits(file: JsonFile) -> tuple[float, float]:
    """Read the bounds of steps. JSON has no infinity: tools write it as `Infinity`, or as an object that says so."""
    value = file.fields.get(_LIMITS)
    if value is None:
        return (0.0, math.inf)
    numbers = [_number(item) for item in value] if isinstance(value, list) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise file.error(_LIMITS, f"is {repr(value)[:80]}; it must be two numbers, from 0 on and not falling")
    return (numbers[0], numbers[1])


def _number(value: object) -> float:
    if isinstance(value, dict):
        value = math.inf if value == {"__float__": "Infinity"} else None
    # JSON has integers that no float holds.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return value if isinstance(value, float) else math.nan


def with_mixers(config: ModelConfig, types: tuple[str, ...], mixers: Mapping[str, MixerShape]) -> ModelConfig:
    """Return the model with other mixers in the layers of these kinds."""
    layers = tuple(
        LayerTraits(mixers.get(kind, layer.mixer), layer.feed_forward)
        for kind, layer in zip(types, config.layers, strict=True)
    )
    return replace(config, layers=layers)
