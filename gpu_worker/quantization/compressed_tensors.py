"""Checkpoints of compressed-tensors: groups of layers, each with its own scheme.

Source: the library's documentation and the tensors that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gpu_worker.quantization.compressed_layers import take_layer
from gpu_worker.quantization.compressed_scheme import Arguments, Scheme, make_scheme
from gpu_worker.quantization.config_fields import check_choice, read_fields
from gpu_worker.quantization.errors import QuantizationError
from gpu_worker.quantization.module_patterns import compile_pattern
from gpu_worker.quantization.tensor_source import TensorSource
from kernels.linear.forms import DenseWeight, WeightForm

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

    @property
    def name(self) -> str:
        """As configurations call it."""
        return NAME

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
    """Read a `quantization_config`.

    Raises:
        QuantizationError: A field is missing, malformed or not supported.
    """
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
