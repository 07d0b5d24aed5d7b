"""AWQ checkpoints: integers of 4 bits in 32-bit words along the output, one scale and zero point a group of inputs.

Source: Lin et al., arXiv 2306.00978; the layout is AutoAWQ's "gemm". Eight neighbouring outputs share a word, the even
ones in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from gpu_worker.quantization.config_fields import QuantizationError, check_choice, read_fields
from gpu_worker.quantization.quantization_method import TensorSource
from gpu_worker.quantization.stored_tensors import (
    columns_of_a_group,
    group_weight,
    take_exact,
    take_scales,
    unpack_words,
)
from kernels.linear.forms import INT4, DenseWeight, WeightForm

NAME = "awq"

_BITS = 4
_PER_WORD = 32 // _BITS
# Where, among the eight values of a word from its lowest bits on, each of the eight outputs stands.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class _Config(msgspec.Struct, frozen=True):
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class AWQ:
    """What the configuration says: columns of a group, -1 for all."""

    group_size: int
    name: str = NAME

    def take(self, source: TensorSource, name: str, out_features: int, in_features: int) -> WeightForm:
        """Do what `QuantizationMethod` promises. A layer without packed weights was left alone."""
        if not source.has(f"{name}.qweight"):
            return DenseWeight(source.take(f"{name}.weight", out_features, in_features))
        group_size = columns_of_a_group(self.group_size, in_features)
        if out_features % _PER_WORD or in_features % group_size or in_features % 2:
            size = f"[{out_features}, {in_features}]"
            limits = f"outputs must be a multiple of {_PER_WORD}, inputs an even one of group_size ({group_size})"
            raise source.error(f"{name}.qweight", f"is of a layer {size}; {limits}")
        num_groups, num_words = in_features // group_size, out_features // _PER_WORD
        words = take_exact(source, f"{name}.qweight", torch.int32, (in_features, num_words))
        zeros = take_exact(source, f"{name}.qzeros", torch.int32, (num_groups, num_words))
        scales = take_scales(source, f"{name}.scales", (num_groups, out_features)).T.contiguous()
        values = INT4.pack(_unpack(words).T)
        return group_weight(values, _BITS, group_size, scales, _unpack(zeros).T.int())


def read_awq(fields: Mapping[str, Any]) -> AWQ:
    """Read a `quantization_config`; `QuantizationError` if a field is malformed or not supported."""
    config = read_fields(fields, _Config)
    check_choice("bits", config.bits if config.bits is not None else config.w_bit, (_BITS,))
    check_choice("version", (config.version or config.format or "gemm").lower(), ("gemm",))
    if not config.zero_point:
        raise QuantizationError("zero_point", "is false; supported: true, as the gemm layout has it")
    size = config.group_size if config.group_size is not None else config.q_group_size
    if size is None or (size != -1 and (size <= 0 or size % 8)):
        raise QuantizationError("group_size", f"is {size}; supported: -1 (all) and multiples of 8")
    return AWQ(size)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the values of `words: [rows, columns]`, in the order of the outputs: `[rows, columns * 8]`."""
    values = unpack_words(words, _BITS).view(*words.shape, _PER_WORD)
    return values[:, :, list(_PLACES)].flatten(1)
