"""Random tensors of every type that can be served, as the bytes of their rows. Every bit of a block is used."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
QUANTIZED = TYPES[3:]
SCALED_BY_HALVES = QUANTIZED[:-1]
# Bytes of a block that hold float16 numbers, and how large these make weights of about 1: the first scales values of
# such a spread, the second (where there is one) is the offset of the block's mean.
HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 0.2),), "Q4_1": ((0, 0.2), (2, -1.5)), "Q5_0": ((0, 0.1),), "Q5_1": ((0, 0.1), (2, -1.5)),
    "Q8_0": ((0, 0.0135),), "Q4_K": ((0, 0.006), (2, 0.045)), "Q5_K": ((0, 0.003), (2, 0.0465)),
    "Q6_K": ((208, 0.00074),), "Q2_K": ((80, 0.1), (82, 0.15)), "Q3_K": ((108, 0.02),), "IQ2_XXS": ((0, 0.02),),
    "IQ2_XS": ((0, 0.02),), "IQ2_S": ((0, 0.02),), "IQ3_XXS": ((0, 0.008),), "IQ3_S": ((0, 0.007),),
    "IQ4_NL": ((0, 0.015),), "IQ4_XS": ((0, 0.0008),),
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


def random_rows(kind: str, rows: int, columns: int, spread: float, seed: int) -> Bytes:
    """Return `[rows, row_bytes]` of weights of about `spread` in size."""
    generator = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        weights = (generator.standard_normal((rows, columns)) * spread).astype(np.float32)
        return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        # An exponent of 127 is a scale of one, for numbers of about three.
        blocks[..., 0] = 126 + round(np.log2(spread)) - generator.integers(0, 2, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    for offset, size in HALVES[kind]:
        halves = size * spread * generator.uniform(0.7, 1.3, blocks.shape[:2])
        blocks[..., offset : offset + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantized(kind: str, raw: Bytes) -> npt.NDArray[np.float32]:
    """Return what the `gguf` package makes of the rows."""
    if kind in ("F32", "F16"):
        return raw.view(np.float32 if kind == "F32" else np.float16).astype(np.float32)
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]), dtype=np.float32)
