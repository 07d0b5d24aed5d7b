"""The tensor types of GGUF that can be served, and the names of those that cannot.

Source: ggml's `ggml_type` and block structures, as documented with the GGUF format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """How the numbers of a tensor are stored: in blocks along a row.

    Attributes:
        number: In the file.
        bits, group_size: Of a value, and of its scale, in the engine's form; no bits are plain floating point.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    bits: int | None = None
    group_size: int = 1


F32 = TensorType("F32", 0, 1, 4)
F16 = TensorType("F16", 1, 1, 2)
BF16 = TensorType("BF16", 30, 1, 2)
Q4_0 = TensorType("Q4_0", 2, 32, 18, bits=4, group_size=32)
Q4_1 = TensorType("Q4_1", 3, 32, 20, bits=4, group_size=32)
Q5_0 = TensorType("Q5_0", 6, 32, 22, bits=8, group_size=32)
Q5_1 = TensorType("Q5_1", 7, 32, 24, bits=8, group_size=32)
Q8_0 = TensorType("Q8_0", 8, 32, 34, bits=8, group_size=32)
Q4_K = TensorType("Q4_K", 12, 256, 144, bits=4, group_size=32)
Q5_K = TensorType("Q5_K", 13, 256, 176, bits=8, group_size=32)
Q6_K = TensorType("Q6_K", 14, 256, 210, bits=8, group_size=16)
Q2_K = TensorType("Q2_K", 10, 256, 84, bits=4, group_size=16)
Q3_K = TensorType("Q3_K", 11, 256, 110, bits=4, group_size=16)
IQ2_XXS = TensorType("IQ2_XXS", 16, 256, 66, bits=8, group_size=32)
IQ2_XS = TensorType("IQ2_XS", 17, 256, 74, bits=8, group_size=16)
IQ2_S = TensorType("IQ2_S", 22, 256, 82, bits=8, group_size=16)
IQ3_XXS = TensorType("IQ3_XXS", 18, 256, 98, bits=8, group_size=32)
IQ3_S = TensorType("IQ3_S", 21, 256, 110, bits=4, group_size=32)
IQ4_NL = TensorType("IQ4_NL", 20, 32, 18, bits=8, group_size=32)
IQ4_XS = TensorType("IQ4_XS", 23, 256, 136, bits=8, group_size=32)
MXFP4 = TensorType("MXFP4", 39, 32, 17, bits=4, group_size=32)

TENSOR_TYPES: Mapping[int, TensorType] = {
    kind.number: kind
    for kind in (
        *(F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
        *(IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, MXFP4),
    )
}
_OTHER_NAMES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 19: "IQ1_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0",
}  # fmt: skip


def type_name(number: int) -> str:
    """Return what a type is called, supported or not."""
    if number in TENSOR_TYPES:
        return TENSOR_TYPES[number].name
    return _OTHER_NAMES.get(number, f"number {number}")
