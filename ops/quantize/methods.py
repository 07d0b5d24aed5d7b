"""The methods of `headrace quantize`, behind one interface: how a matrix is rounded, and how its checkpoint looks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from ops.quantize.gptq import gptq
from ops.quantize.grid import (
    QuantizedMatrix,
    ScaledRows,
    Tensors,
    float8_rows,
    gptq_tensors,
    int8_rows,
    pack_quantized_tensors,
    round_to_nearest,
    scaled_row_tensors,
)
from ops.quantize.layer_pass import InputMoments

BITS = 4
# Of the head: nothing behind it can mend the changes of its rounding.
HEAD_BITS = 8
HEAD = "lm_head"

Inputs = Mapping[str, InputMoments]
"""Of a layer's matrices, by their names in `layer_blocks`."""


class Rounded(Protocol):
    """A matrix after rounding."""

    def dequantize(self) -> torch.Tensor:
        """Return the weights, `[out_features, in_features]` float32."""
        ...

    def split(self, rows: Sequence[int]) -> Sequence[Rounded]:
        """Return the matrices that this one is made of; each has its number of `rows`."""
        ...


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """One way to quantize: by itself it leaves layers as they are and looks at no inputs."""

    group_size: int | None = None
    """Input features that share a scale; None where a row does."""
    needs_inputs: ClassVar[bool] = False
    """Whether it looks at calibration inputs."""
    row_multiple: ClassVar[int] = 1
    """Output features of a matrix are a multiple of it, because of the checkpoint's words."""

    @abstractmethod
    def round(self, name: str, weight: torch.Tensor, inputs: InputMoments | None) -> Rounded:
        """Round a matrix, `[out_features, in_features]` float32, of the name that `LayerWeights` has for it."""

    @abstractmethod
    def tensors(self, matrix: Rounded) -> Tensors:
        """Return the tensors that the checkpoint stores of a matrix, by their names behind its module's and a dot."""

    @abstractmethod
    def head_tensors(self, weight: torch.Tensor) -> Tensors:
        """Return the checkpoint's tensors of the head, rounded to eight bits, by their names behind `lm_head.`."""

    @abstractmethod
    def config(self, *, has_head: bool, ignored: Sequence[str] = ()) -> dict[str, object]:
        """Return the `quantization_config` of a checkpoint whose head is rounded, or left alone.

        Modules that are `ignored` are not quantized: names, or patterns behind `re:`.
        """


@dataclass(frozen=True, slots=True)
class Rows(Method):
    """int8 or float8 weights with a scale a row, and inputs quantized per token."""

    is_float8: bool = field(kw_only=True)

    def round(self, name: str, weight: torch.Tensor, inputs: InputMoments | None) -> ScaledRows:
        """Round to the row's scale."""
        return float8_rows(weight) if self.is_float8 else int8_rows(weight)

    def tensors(self, matrix: Rounded) -> Tensors:
        """Return values and scales."""
        assert isinstance(matrix, ScaledRows)
        return scaled_row_tensors(matrix)

    def head_tensors(self, weight: torch.Tensor) -> Tensors:
        """Round the head like other matrices."""
        return self.tensors(self.round(HEAD, weight, None))

    def config(self, *, has_head: bool, ignored: Sequence[str] = ()) -> dict[str, object]:
        """Return compressed-tensors' description."""
        group = _row_group("float" if self.is_float8 else "int", ["Linear", HEAD] if has_head else ["Linear"])
        return _compressed_config(str(group["format"]), [group], has_head, ignored)


@dataclass(frozen=True, slots=True)
class Nearest(Method):
    """4-bit groups, each weight rounded to the nearest level; the head in int8, a scale a row."""

    group_size: int

    def round(self, name: str, weight: torch.Tensor, inputs: InputMoments | None) -> QuantizedMatrix:
        """Round to the nearest level."""
        return round_to_nearest(weight, BITS, self.group_size, is_symmetric=True)

    def tensors(self, matrix: Rounded) -> Tensors:
        """Return packed values and scales."""
        assert isinstance(matrix, QuantizedMatrix)
        return pack_quantized_tensors(matrix)

    def head_tensors(self, weight: torch.Tensor) -> Tensors:
        """Round each row to its scale."""
        return scaled_row_tensors(int8_rows(weight))

    def config(self, *, has_head: bool, ignored: Sequence[str] = ()) -> dict[str, object]:
        """Return compressed-tensors' description."""
        weights = {
            "num_bits": BITS,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group_size,
            "dynamic": False,
        }
        group = _group("pack-quantized", ["Linear"], weights, None)
        if not has_head:
            return _compressed_config("pack-quantized", [group], has_head, ignored)
        return _compressed_config("mixed-precision", [_row_group("int", [HEAD]), group], has_head, ignored)


@dataclass(frozen=True, slots=True)
class Gptq(Method):
    """4-bit groups, rounded so that later columns make up for earlier ones; the head to the nearest of 8 bits."""

    group_size: int
    needs_inputs = True
    row_multiple = 8

    def round(self, name: str, weight: torch.Tensor, inputs: InputMoments | None) -> QuantizedMatrix:
        """Round by the inputs' second moments; an expert that was given none, to the nearest level."""
        assert inputs is not None
        if inputs.num_tokens == 0:
            return round_to_nearest(weight, BITS, self.group_size, is_symmetric=True)
        return gptq(weight, inputs.gram, BITS, self.group_size, is_symmetric=True)

    def tensors(self, matrix: Rounded) -> Tensors:
        """Return the tensors that GPTQ's readers expect."""
        assert isinstance(matrix, QuantizedMatrix)
        return gptq_tensors(matrix)

    def head_tensors(self, weight: torch.Tensor) -> Tensors:
        """Round to the nearest level: in eight bits there is little to make up for."""
        return gptq_tensors(round_to_nearest(weight, HEAD_BITS, self.group_size, is_symmetric=True))

    def config(self, *, has_head: bool, ignored: Sequence[str] = ()) -> dict[str, object]:
        """Return GPTQ's description; groups are stored in order, so to readers there is no act-order."""
        rules: dict[str, object] = {f"+:{HEAD}": {"bits": HEAD_BITS}} if has_head else {}
        rules |= {f"-:{_pattern(name)}": {} for name in ignored}
        return {
            "quant_method": "gptq",
            "bits": BITS,
            "group_size": self.group_size,
            "sym": True,
            "desc_act": False,
            "static_groups": True,
            "damp_percent": 0.01,
            "lm_head": has_head,
            "checkpoint_format": "gptq",
            **({"dynamic": rules} if rules else {}),
        }


def _pattern(ignored: str) -> str:
    """Return the regular expression of a module's name, or of the names that `re:` stands before."""
    return ignored.removeprefix("re:") if ignored.startswith("re:") else re.escape(ignored)


def make_method(name: str, group_size: int) -> Method:
    """Return a method by its name on the command line: int8, fp8, rtn-int4 or gptq."""
    if name in ("int8", "fp8"):
        return Rows(is_float8=name == "fp8")
    return Nearest(group_size) if name == "rtn-int4" else Gptq(group_size)


def _row_group(kind: str, targets: list[str]) -> dict[str, object]:
    """Describe layers of 8-bit rows whose inputs are quantized per token."""
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    weights = {**common, "strategy": "channel", "dynamic": False}
    return _group(f"{kind}-quantized", targets, weights, {**common, "strategy": "token", "dynamic": True})


def _group(
    layout: str, targets: list[str], weights: dict[str, object], inputs: dict[str, object] | None
) -> dict[str, object]:
    activations = {"input_activations": inputs, "output_activations": None}
    return {"targets": targets, "format": layout, "weights": weights, **activations}


def _compressed_config(
    layout: str, groups: list[dict[str, object]], has_head: bool, ignored: Sequence[str]
) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [*([] if has_head else [HEAD]), *ignored],
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
    }
