"""Unpacking against the `gguf` package, on random blocks and on extreme ones."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.quantization.gguf import blocks
from gpu_worker.quantization.gguf.blocks import NonFiniteScaleError, unpack
from gpu_worker.quantization.gguf.tensor_types import TENSOR_TYPES, TensorType
from tests.gpu_worker.quantization.gguf.raw_blocks import (
    HALVES,
    QUANTIZED,
    SCALED_BY_HALVES,
    TYPES,
    Bytes,
    dequantized,
    random_rows,
)

IN_SIXTEENS = ("Q2_K", "Q3_K", "Q6_K", "IQ2_XS", "IQ2_S")
BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}


def assert_equals_oracle(raw: Bytes, name: str) -> None:
    weight = unpack(torch.from_numpy(raw), BY_NAME[name])
    expected = dequantized(name, raw)
    assert (weight.number.bits, weight.group_size) == (BY_NAME[name].bits, 16 if name in IN_SIXTEENS else 32)
    assert weight.shape == expected.shape
    # Equal, not close: every step of ours is exact, or rounds as the oracle's does.
    assert np.array_equal(weight.dequantize().numpy(), expected)


def test_types_are_those_of_the_format() -> None:
    assert set(BY_NAME) == set(TYPES)
    for kind in BY_NAME.values():
        number = gguf.GGMLQuantizationType[kind.name]
        assert kind.number == number
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[number]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (7, 768), (33, 1280)])
def test_random_blocks_equal_the_gguf_package(name: str, rows: int, columns: int) -> None:
    assert_equals_oracle(random_rows(name, rows, columns, 1.0, seed=rows), name)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if BY_NAME[name].block_size == 32])
def test_a_single_block_a_row_equals_the_gguf_package(name: str) -> None:
    assert_equals_oracle(random_rows(name, 5, 32, 1.0, seed=1), name)


@pytest.mark.parametrize("name", SCALED_BY_HALVES)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, 0x55])
@pytest.mark.parametrize("scale", [0.0, -0.0, 65504.0, -65504.0, 6e-8, 1.0])
def test_extreme_blocks_equal_the_gguf_package(name: str, fill: int, scale: float) -> None:
    kind = BY_NAME[name]
    raw = random_rows(name, 3, 512, 1.0, seed=2)
    whole = raw.reshape(-1, kind.block_bytes)
    whole[:] = fill
    for begin, _ in HALVES[name]:
        whole[:, begin : begin + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    assert_equals_oracle(raw, name)


@pytest.mark.parametrize("name", SCALED_BY_HALVES)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scale_that_is_no_number_is_refused(name: str, scale: float) -> None:
    kind = BY_NAME[name]
    raw = random_rows(name, 3, 512, 1.0, seed=3)
    begin = kind.block_bytes + HALVES[name][0][0]
    raw[1, begin : begin + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    with pytest.raises(NonFiniteScaleError):
        unpack(torch.from_numpy(raw), kind)


@pytest.mark.parametrize("exponent", [0, 1, 120, 254])
def test_microscaled_blocks_of_any_exponent_equal_the_gguf_package(exponent: int) -> None:
    raw = random_rows("MXFP4", 3, 512, 1.0, seed=6)
    raw.reshape(-1, BY_NAME["MXFP4"].block_bytes)[:, 0] = exponent
    # The largest exponent has numbers that float32 does not, for which the package warns.
    with np.errstate(over="ignore"):
        assert_equals_oracle(raw, "MXFP4")


def test_exponent_of_what_is_no_number_is_refused() -> None:
    raw = random_rows("MXFP4", 3, 512, 1.0, seed=7)
    raw[1, BY_NAME["MXFP4"].block_bytes] = 255
    with pytest.raises(NonFiniteScaleError):
        unpack(torch.from_numpy(raw), BY_NAME["MXFP4"])


@pytest.mark.parametrize("name", QUANTIZED)
def test_tensors_unpacked_in_chunks_equal_those_unpacked_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_rows(name, 11, 512, 1.0, seed=4)
    monkeypatch.setattr(blocks, "_CHUNK_BYTES", 3 * raw.shape[1])
    assert_equals_oracle(raw, name)


def test_small_blocks_of_the_packages_own_quantizer_come_back() -> None:
    weights = np.random.default_rng(5).standard_normal((6, 320)).astype(np.float32)
    for name, tolerance in (("Q8_0", 0.02), ("Q5_0", 0.15), ("Q4_0", 0.3), ("Q4_1", 0.3)):
        kind: TensorType = BY_NAME[name]
        raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
        assert np.abs(unpack(torch.from_numpy(raw), kind).dequantize().numpy() - weights).max() < tolerance
