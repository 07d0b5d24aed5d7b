"""FP8 checkpoints (`quant_method` "fp8"): float8_e4m3fn weights with a scale a tensor, row or block of 128 by 128.

Those of NVIDIA's Model Optimizer ("modelopt") have a scale for each matrix and one for its inputs.

Source: the layout of vLLM and, with blocks, of DeepSeek-V3 (arXiv 2412.19437, section 3.3); for "modelopt", the files
that the tool writes and vLLM's documentation of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError, check_choice, read_fields
from gpu_worker.quantization.quantization_method import TensorSource
from gpu_worker.quantization.stored_tensors import (
    take_activation_scale,
    take_float8,
    take_weight_scales,
)
from kernels.linear.forms import SCALE_BLOCK, DenseWeight, ScaledWeight, WeightForm

NAME = "fp8"

# Where one tensor holds the matrices of all experts, these follow its name in those of its scales and of its inputs'.
_STACK_SCALES, _STACK_INPUT_SCALES = "_scale_inv", "_activation_scale"


class _Config(msgspec.Struct, frozen=True):
    activation_scheme: str = "dynamic"
    weight_block_size: list[int] | None = None
    fmt: str = "e4m3"


@dataclass(frozen=True, slots=True)
class FP8:
    """FP8 weights, with a scale a block or not; inputs may have static scales from the checkpoint."""

    is_static: bool
    has_blocks: bool
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Do what `QuantizationMethod` promises. A layer without scales was left alone."""
        scale_name = next((s for s in ("weight_scale", "weight_scale_inv") if source.has(f"{name}.{s}")), None)
        if scale_name is None:
            return DenseWeight(source.take(f"{name}.weight", out_features, in_features))
        shape = (out_features, in_features)
        values = take_float8(source, f"{name}.weight", shape)
        scales = take_weight_scales(source, f"{name}.{scale_name}", shape, has_blocks=self.has_blocks)
        if not self.is_static:
            return ScaledWeight(values, scales, "dynamic")
        scale = "input_scale" if source.has(f"{name}.input_scale") else "activation_scale"
        return ScaledWeight(values, scales, "static", take_activation_scale(source, f"{name}.{scale}"))

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Do what `StackMethod` promises."""
        return source.has(f"{name}{_STACK_SCALES}")

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Do what `StackMethod` promises; matrices may be stored turned round, and then their scales are too."""
        scale_name, (count, rows, columns) = f"{name}{_STACK_SCALES}", shape
        stored = source.shape(name)
        is_turned = stored != shape and stored == (count, columns, rows)
        one = (columns, rows) if is_turned else (rows, columns)
        if stored != (count, *one):
            raise source.error(name, f"has shape {list(stored)}; config.json calls for {list(shape)}")
        if source.shape(scale_name)[:1] != (count,):
            raise source.error(scale_name, f"has shape {list(source.shape(scale_name))}; it must begin with {count}")
        values = take_float8(source, name, one, index)
        scales = take_weight_scales(source, scale_name, one, has_blocks=self.has_blocks, index=index)
        if is_turned:
            values = values.T.contiguous()
            scales = scales.T.contiguous() if self.has_blocks else scales
        if not self.is_static:
            return ScaledWeight(values, scales, "dynamic")
        inputs = f"{name}{_STACK_INPUT_SCALES}"
        return ScaledWeight(values, scales, "static", take_activation_scale(source, inputs, index))


def read_fp8(fields: Mapping[str, Any]) -> FP8:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    check_choice("activation_scheme", config.activation_scheme.lower(), ("dynamic", "static"))
    check_choice("weight_block_size", config.weight_block_size, (None, [SCALE_BLOCK, SCALE_BLOCK]))
    check_choice("fmt", config.fmt.lower(), ("e4m3", "float8_e4m3fn"))
    is_static = config.activation_scheme.lower() == "static"
    if config.weight_block_size is not None:
        check_choice("activation_scheme", config.activation_scheme.lower(), ("dynamic",))
    return FP8(is_static, config.weight_block_size is not None)


MODELOPT = "modelopt"

OWN_FILE = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt puts the configuration, in the field `quantization`, if `config.json` has none."""


class _ModelOptConfig(msgspec.Struct, frozen=True):
    quant_algo: str


def read_modelopt(fields: Mapping[str, Any]) -> FP8:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _ModelOptConfig)
    if config.quant_algo.upper() != "FP8":
        raise QuantizationError("quant_algo", f"is {config.quant_algo[:80]!r}; supported: 'FP8'; {OTHER_FORMS}")
    return FP8(is_static=True, has_blocks=False)
