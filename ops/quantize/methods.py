"""The methods of `headrace quantize`: how a matrix is rounded, and how its checkpoint looks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ops.quantize.gptq import gptq
from ops.quantize.grid import (
    QuantizedMatrix,
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
class Method:
    """One way to quantize.

    Attributes:
        round: Rounds a matrix, `[out_features, in_features]` float32, by the inputs that it was given.
        tensors: Returns the stored tensors of a rounded matrix, by their names after the module's and a dot.
        head_tensors: Rounds the head to eight bits, and returns its stored tensors.
        config: Returns the `quantization_config` of a checkpoint whose head is rounded, or left alone. Modules that
            are ignored are not quantized: names, or patterns behind `re:`.
        group_size: Input features that share a scale; None where a row does.
        needs_inputs: Whether it looks at calibration inputs.
        row_multiple: Output features of a matrix are a multiple of it, because of the checkpoint's words.
    """

    round: Callable[[torch.Tensor, InputMoments | None], Rounded]
    tensors: Callable[[Any], Tensors]
    head_tensors: Callable[[torch.Tensor], Tensors]
    config: Callable[[bool, Sequence[str]], dict[str, object]]
    group_size: int | None = None
    needs_inputs: bool = False
    row_multiple: int = 1


def make_method(name: str, group_size: int) -> Method:
    """Return a method by its name on the command line: int8, fp8, rtn-int4 or gptq."""
    if name in ("int8", "fp8"):
        rows, kind = (float8_rows, "float") if name == "fp8" else (int8_rows, "int")
        return Method(
            lambda weight, _: rows(weight),
            scaled_row_tensors,
            lambda weight: scaled_row_tensors(rows(weight)),
            partial(_rows_config, kind),
        )
    if name == "rtn-int4":
        return Method(
            lambda weight, _: round_to_nearest(weight, BITS, group_size),
            pack_quantized_tensors,
            lambda weight: scaled_row_tensors(int8_rows(weight)),
            partial(_nearest_config, group_size),
            group_size,
        )

    def by_moments(weight: torch.Tensor, inputs: InputMoments | None) -> QuantizedMatrix:
        assert inputs is not None
        if inputs.num_tokens == 0:
            # An expert that was given none.
            return round_to_nearest(weight, BITS, group_size)
        return gptq(weight, inputs.gram, BITS, group_size)

    return Method(
        by_moments,
        gptq_tensors,
        lambda weight: gptq_tensors(round_to_nearest(weight, HEAD_BITS, group_size)),
        partial(_gptq_config, group_size),
        group_size,
        needs_inputs=True,
        row_multiple=8,
    )


def _rows_config(kind: str, has_head: bool, ignored: Sequence[str]) -> dict[str, object]:
    group = _row_group(kind, ["Linear", HEAD] if has_head else ["Linear"])
    return _compressed_config(f"{kind}-quantized", [group], has_head, ignored)


def _nearest_config(group_size: int, has_head: bool, ignored: Sequence[str]) -> dict[str, object]:
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    group = _group("pack-quantized", ["Linear"], {**weights, "dynamic": False}, None)
    if not has_head:
        return _compressed_config("pack-quantized", [group], has_head, ignored)
    return _compressed_config("mixed-precision", [_row_group("int", [HEAD]), group], has_head, ignored)


def _gptq_config(group_size: int, has_head: bool, ignored: Sequence[str]) -> dict[str, object]:
    """Return GPTQ's description; groups are stored in order, so to readers there is no act-order."""
    rules: dict[str, object] = {f"+:{HEAD}": {"bits": HEAD_BITS}} if has_head else {}
    rules |= {f"-:{_pattern(name)}": {} for name in ignored}
    return {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": group_size,
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


def _row_group(kind: str, targets: list[str]) -> dict[str, object]:
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
