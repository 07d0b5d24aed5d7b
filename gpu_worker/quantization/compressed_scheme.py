"""How one config group of a compressed-tensors checkpoint stores its layers: what can be served, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError, check_choice
from kernels.linear.forms import SCALE_BLOCK, Activation

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
    supported = ("tensor", "channel", "block") if layout is Layout.FLOAT8 else ("tensor", "channel", "group")
    check_choice(f"{where}.strategy", strategy, supported)
    if strategy == "group" and (weights.group_size is None or weights.group_size <= 0 or weights.group_size % 8):
        raise QuantizationError(f"{where}.group_size", f"is {weights.group_size}; supported: multiples of 8")
    if strategy == "block":
        check_choice(
            f"{where}.block_structure",
            weights.block_structure,
            ([SCALE_BLOCK, SCALE_BLOCK], f"{SCALE_BLOCK}x{SCALE_BLOCK}"),
        )
    if not weights.symmetric and (layout is Layout.FLOAT8 or strategy == "tensor"):
        raise QuantizationError(f"{where}.symmetric", "is false; supported: integers with a scale a channel or group")
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
    if layout is Layout.PACKED or weight_strategy == "group" or not weights.symmetric:
        problem = "is set; supported: weights alone, where they are packed, have groups or are not symmetric"
        raise QuantizationError(place, problem)
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
