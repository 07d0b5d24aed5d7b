"""Checkpoints of compressed-tensors: groups of layers, each with its own scheme.

Source: the library's documentation and the tensors that it writes.

How one config group of a compressed-tensors checkpoint stores its layers: what can be served, checked once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec
import torch

from gpu_worker.quantization.config_fields import (
    OTHER_FORMS,
    QuantizationError,
    check_choice,
    compile_pattern,
    read_fields,
)
from gpu_worker.quantization.quantization_method import TensorSource
from gpu_worker.quantization.stored_tensors import (
    columns_of_a_group,
    group_weight,
    take_activation_scale,
    take_exact,
    take_float8,
    take_input_order,
    take_scales,
    take_weight_scales,
    unpack_words,
)
from kernels.linear.forms import SCALE_BLOCK, Activation, DenseWeight, GroupQuantizedWeight, ScaledWeight, WeightForm

_ORDERED = (True, "group", "dynamic")
_UNORDERED = (None, False, "weight", "static")


class Arguments(msgspec.Struct, frozen=True):
    """How weights, or inputs, are quantized."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None

    def resolved_strategy(self) -> str:
        """What shares a scale; where it is not said, the group size does."""
        if self.strategy is not None:
            return self.strategy.lower()
        if self.group_size is None:
            return "tensor"
        return "group" if self.group_size > 0 else "channel"


class Layout(Enum):
    """How values are stored."""

    PACKED = auto()
    INT8 = auto()
    FLOAT8 = auto()


_STRATEGIES: Mapping[Layout, tuple[str, ...]] = {Layout.PACKED: ("group",), Layout.INT8: (), Layout.FLOAT8: ("block",)}
"""What may share a scale beside all weights of a matrix and those of a channel."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How layers are stored.

    Attributes:
        strategy: What shares a scale: the "tensor", a "channel", a "group" or a "block".
        group_size: Columns of a group.
        has_input_order: Each input feature names its group.
        activation: As of `ScaledWeight`.
    """

    layout: Layout
    bits: int
    strategy: str
    group_size: int | None
    is_symmetric: bool
    has_input_order: bool
    activation: Activation


def make_scheme(place: str, layout_name: str, weights: Arguments, inputs: Arguments | None) -> Scheme:
    """Check a config group, which stands at `place`; `QuantizationError` if it is not supported."""
    layout = _layout(place, layout_name, weights)
    where = f"{place}.weights"
    check_choice(f"{where}.num_bits", weights.num_bits, (4, 8) if layout is Layout.PACKED else (8,))
    strategy = weights.resolved_strategy()
    check_choice(f"{where}.strategy", strategy, ("tensor", "channel", *_STRATEGIES[layout]))
    if strategy == "group" and (weights.group_size is None or weights.group_size <= 0 or weights.group_size % 8):
        raise QuantizationError(f"{where}.group_size", f"is {weights.group_size}; supported: multiples of 8")
    if strategy == "block":
        check_choice(
            f"{where}.block_structure",
            weights.block_structure,
            ([SCALE_BLOCK, SCALE_BLOCK], f"{SCALE_BLOCK}x{SCALE_BLOCK}"),
        )
    if not weights.symmetric and (layout is not Layout.PACKED or strategy == "tensor"):
        problem = "is false; supported: packed integers with a scale a channel or group"
        raise QuantizationError(f"{where}.symmetric", problem)
    check_choice(f"{where}.actorder", weights.actorder, _ORDERED + _UNORDERED)
    return Scheme(
        layout,
        weights.num_bits,
        strategy,
        weights.group_size if strategy == "group" else None,
        weights.symmetric,
        weights.actorder in _ORDERED,
        "none" if inputs is None else _activation(f"{place}.input_activations", layout, weights, inputs),
    )


def _layout(place: str, name: str, weights: Arguments) -> Layout:
    layouts = {
        ("pack-quantized", "int"): Layout.PACKED,
        ("int-quantized", "int"): Layout.INT8,
        ("naive-quantized", "int"): Layout.INT8,
        ("float-quantized", "float"): Layout.FLOAT8,
        ("naive-quantized", "float"): Layout.FLOAT8,
    }
    layout = layouts.get((name, weights.type.lower()))
    if layout is None:
        allowed = ", ".join(f"{kind} of {values}" for kind, values in layouts)
        problem = f"is {name[:80]!r} of {weights.type[:80]}; supported: {allowed}; {OTHER_FORMS}"
        raise QuantizationError(f"{place}.format", problem)
    return layout


def _activation(place: str, layout: Layout, weights: Arguments, inputs: Arguments) -> Activation:
    strategy, weight_strategy = inputs.resolved_strategy(), weights.resolved_strategy()
    if layout is Layout.PACKED:
        raise QuantizationError(place, "is set; supported: weights alone, where they are packed")
    check_choice(f"{place}.type", inputs.type.lower(), (weights.type.lower(),))
    check_choice(f"{place}.num_bits", inputs.num_bits, (8,))
    check_choice(f"{place}.symmetric", inputs.symmetric, (True,))
    check_choice(f"{place}.dynamic", inputs.dynamic, (True, False))
    if not inputs.dynamic:
        check_choice(f"{place}.strategy", strategy, ("tensor",))
        if weight_strategy == "block":
            raise QuantizationError(f"{place}.dynamic", "is false; supported with blocks: true")
        return "static"
    if weight_strategy == "block" and strategy == "group":
        check_choice(f"{place}.group_size", inputs.group_size, (SCALE_BLOCK,))
        return "dynamic"
    # A scale a token is finer than one a tensor, which would make an answer depend on the requests beside it.
    check_choice(f"{place}.strategy", strategy, ("token", "tensor"))
    return "dynamic"


NAME = "compressed-tensors"

# What the class of every layer that is taken here is called.
_LAYER_CLASS = "Linear"


class _Group(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: Arguments | None = None
    input_activations: Arguments | None = None
    output_activations: Arguments | None = None
    format: str | None = None


class _Config(msgspec.Struct, frozen=True):
    config_groups: dict[str, _Group]
    format: str = "dense"
    ignore: list[str] = []
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Targets:
    """Layers by name, by pattern, or all."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def has_named(self, *names: str) -> bool:
        """Whether a layer of one of these names is meant by name."""
        return any(name in self.names or any(pattern.match(name) for pattern in self.patterns) for name in names)

    @property
    def has_all(self) -> bool:
        """Whether every layer is meant."""
        return _LAYER_CLASS in self.names


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """What the configuration says: layers that were left alone, and the schemes of others."""

    ignored: Targets
    groups: tuple[tuple[Targets, Scheme], ...]
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Do what `QuantizationMethod` promises."""
        scheme = self._scheme(source.stored_module(name), name)
        if scheme is None:
            return DenseWeight(source.take(f"{name}.weight", out_features, in_features))
        return take_layer(source, name, (out_features, in_features), scheme)

    def _scheme(self, *names: str) -> Scheme | None:
        """Find the scheme of a layer of these names: that of the group that names it goes before one for all."""
        if self.ignored.has_named(*names) or self.ignored.has_all:
            return None
        named = [scheme for targets, scheme in self.groups if targets.has_named(*names)]
        return next(iter(named + [scheme for targets, scheme in self.groups if targets.has_all]), None)


def read_compressed_tensors(fields: Mapping[str, Any]) -> CompressedTensors:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    check_choice("sparsity_config.format", config.sparsity_config.get("format", "dense"), ("dense",))
    if config.transform_config.get("config_groups"):
        raise QuantizationError("transform_config", "is set; supported: weights that are not transformed")
    groups = tuple(
        (_targets(f"config_groups.{name[:80]}.targets", group.targets), _scheme(name[:80], group, config.format))
        for name, group in config.config_groups.items()
    )
    return CompressedTensors(_targets("ignore", config.ignore), groups)


def _scheme(name: str, group: _Group, layout: str) -> Scheme:
    place = f"config_groups.{name}"
    if group.weights is None:
        raise QuantizationError(f"{place}.weights", "is missing; supported: groups with quantized weights")
    if group.output_activations is not None:
        raise QuantizationError(f"{place}.output_activations", "is set; supported: outputs that are not quantized")
    return make_scheme(place, group.format or layout, group.weights, group.input_activations)


def _targets(field: str, texts: list[str]) -> Targets:
    patterns = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
    names = frozenset(text for text in texts if not text.startswith("re:"))
    return Targets(names, tuple(compile_pattern(field, text) for text in patterns))


def take_layer(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> WeightForm:
    """Take a layer's weights; what `source.error` makes is raised."""
    if scheme.is_symmetric and source.has(f"{name}.weight_zero_point"):
        # Some versions store the zeros that symmetry implies.
        source.take_raw(f"{name}.weight_zero_point")
    if scheme.layout is Layout.PACKED:
        return _take_packed(source, name, shape, scheme)
    if scheme.layout is Layout.INT8:
        values = take_exact(source, f"{name}.weight", torch.int8, shape)
    else:
        values = take_float8(source, f"{name}.weight", shape)
    scales = take_weight_scales(source, f"{name}.weight_scale", shape, has_blocks=scheme.strategy == "block")
    scale = take_activation_scale(source, f"{name}.input_scale") if scheme.activation == "static" else None
    return ScaledWeight(values, scales, scheme.activation, scale)


def _take_packed(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> GroupQuantizedWeight:
    rows, columns = shape
    bits, per_word = scheme.bits, 32 // scheme.bits
    if bits == 4 and columns % 2:
        raise source.error(f"{name}.weight_packed", f"is of a layer {list(shape)}; inputs must be even in number")
    words = take_exact(source, f"{name}.weight_packed", torch.int32, (rows, -(-columns // per_word)))
    if source.has(f"{name}.weight_shape"):
        stored = source.take_raw(f"{name}.weight_shape").tolist()
        if stored != list(shape):
            raise source.error(f"{name}.weight_shape", f"is {stored}; config.json calls for {list(shape)}")
    # Words hold neighbours along the input, so that their bytes are what the engine packs; the last may have too many.
    values = words.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    scales = _take_group_scales(source, name, shape, scheme)
    zeros: torch.Tensor | int = 1 << (bits - 1)
    if not scheme.is_symmetric:
        num_words = -(-rows // per_word)
        packed = take_exact(source, f"{name}.weight_zero_point", torch.int32, (num_words, scales.shape[1]))
        zeros = unpack_words(packed.T, bits)[:, :rows].T.int()
    return group_weight(
        values, bits, _group_size(scheme, columns), scales, zeros, _take_order(source, name, scheme, columns)
    )


def _take_group_scales(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> torch.Tensor:
    rows, columns = shape
    if scheme.strategy == "group":
        return take_scales(source, f"{name}.weight_scale", (rows, -(-columns // _group_size(scheme, columns))))
    return take_weight_scales(source, f"{name}.weight_scale", shape).expand(rows, 1).contiguous()


def _take_order(source: TensorSource, name: str, scheme: Scheme, columns: int) -> torch.Tensor | None:
    if not scheme.has_input_order:
        return None
    return take_input_order(source, f"{name}.weight_g_idx", columns, _group_size(scheme, columns))


def _group_size(scheme: Scheme, columns: int) -> int:
    return columns_of_a_group(scheme.group_size or -1, columns)
