"""MXFP4 checkpoints (`quant_method` "mxfp4"), as gpt-oss' are: experts alone, 32 numbers of 4 bits to an exponent.

Source: OCP Microscaling Formats, version 1.0, section 5; the layout is that of OpenAI's checkpoints. A byte holds two
neighbouring inputs, the first in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.quantization.quantization_method import TensorSource
from gpu_worker.quantization.stored_tensors import take_exact
from kernels.linear.forms import FLOAT4, DenseWeight, GroupQuantizedWeight, WeightForm

NAME = "mxfp4"
GROUP_SIZE = 32

_BLOCKS, _SCALES = "_blocks", "_scales"
# A stored exponent of all ones says that none of the block's numbers is one.
_NOT_A_NUMBER = 255


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Matrices of all experts are blocks and exponents; linear layers outside of experts are plain numbers."""

    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Do what `QuantizationMethod` promises."""
        return DenseWeight(source.take(f"{name}.weight", out_features, in_features))

    def has_stack(self, source: TensorSource, name: str) -> bool:
        """Do what `StackMethod` promises."""
        return source.has(f"{name}{_BLOCKS}")

    def take_item(self, source: TensorSource, name: str, index: int, shape: tuple[int, int, int]) -> WeightForm:
        """Do what `StackMethod` promises."""
        _, rows, columns = shape
        if columns % GROUP_SIZE:
            raise source.error(f"{name}{_BLOCKS}", f"is of {columns} inputs; they must be a multiple of {GROUP_SIZE}")
        num_groups = columns // GROUP_SIZE
        blocks = _take_bytes(source, f"{name}{_BLOCKS}", index, shape[0], (rows, num_groups, GROUP_SIZE // 2))
        exponents = _take_bytes(source, f"{name}{_SCALES}", index, shape[0], (rows, num_groups))
        if (exponents == _NOT_A_NUMBER).any():
            raise source.error(f"{name}{_SCALES}", "has exponents that are NaN; the checkpoint is damaged")
        return GroupQuantizedWeight(blocks.flatten(1), FLOAT4, GROUP_SIZE, exponents.view(torch.float8_e8m0fnu))


def read_mxfp4(fields: Mapping[str, Any]) -> MXFP4:
    """Read a `quantization_config`. Unconverted layers need no list: their tensors have other names."""
    return MXFP4()


def _take_bytes(source: TensorSource, name: str, index: int, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    stack = (count, *shape)
    if source.shape(name) != stack:
        raise source.error(name, f"has shape {list(source.shape(name))}; config.json calls for {list(stack)}")
    return take_exact(source, name, torch.uint8, shape, index)
