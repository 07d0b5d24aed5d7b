"""The packed multiplication against plain torch; the gated form is tested through the decoder stack."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu_library import CpuLibrary
from kernels.linear.dense.cpu import can_pack, linear, pack
from kernels.linear.reference import linear_reference
from tests.kernels.poisoned_memory import poisoned_memory

DTYPES = [torch.float32, torch.bfloat16]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), [(1, 64, 97), (2, 62, 64), (7, 2, 5), (200, 704, 130)])
def test_product_equals_reference(
    library: CpuLibrary, num_rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    wide = torch.full((num_rows, inputs + 6), float("nan"), dtype=dtype)
    wide[:, :inputs] = torch.randn(num_rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype) * inputs**-0.5
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    packed = pack(library, weight, bias)
    with poisoned_memory():
        exact = linear(wide[:, :inputs], packed, to_float32=True)
        rounded = linear(wide[:, :inputs], packed)
    expected = linear_reference(wide[:, :inputs], weight, bias, to_float32=True)
    torch.testing.assert_close(exact, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_does_not_depend_on_batch_or_threads(library: CpuLibrary, dtype: torch.dtype) -> None:
    x, packed = torch.randn(101, 128).to(dtype), pack(library, torch.randn(200, 128).to(dtype))
    together = linear(x, packed)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        parallel = linear(x, packed)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(parallel, together)
    for row in (0, 5, 6, 96, 100):
        assert torch.equal(linear(x[row : row + 1], packed)[0], together[row])


def test_not_a_number_stays_one(library: CpuLibrary) -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    result = linear(x, pack(library, torch.ones(3, 8, dtype=torch.bfloat16)))
    assert result.isnan().tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7, 16, 64, 200])
def test_weights_of_16_bits_have_the_bits_of_their_float32_copy(
    library: CpuLibrary, num_rows: int, half: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(170, 334, generator=generator).to(half)
    bias = torch.randn(170, generator=generator)
    x = torch.randn(num_rows, 334, generator=generator)
    with poisoned_memory():
        ours = linear(x, pack(library, weight, bias))
        wide = linear(x, pack(library, weight.float(), bias))
    assert torch.equal(ours, wide)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_number_of_16_bits_is_widened_exactly(library: CpuLibrary, half: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half).view(512, 128)
    finite = torch.where(codes.isfinite(), codes, 0)
    # Each row picks out one column; zeros times finite numbers add nothing.
    products = linear(torch.eye(128), pack(library, finite))
    assert torch.equal(products, finite.float().T)
    mixed = linear(torch.full((1, 128), 1e-3), pack(library, codes))
    assert torch.equal(mixed.isfinite()[0], codes.isfinite().all(1))


def test_rows_of_float16_are_multiplied_in_float32_and_rounded_once(library: CpuLibrary) -> None:
    x, weight = torch.randn(5, 64).half(), torch.randn(70, 64).half()
    packed = pack(library, weight)
    exact = linear(x.float(), packed)
    assert torch.equal(linear(x, packed), exact.half())
    assert torch.equal(linear(x, packed, to_float32=True), exact)


def test_unsupported_matrices_are_refused() -> None:
    for half in HALVES:
        assert not can_pack(torch.zeros(4, 3, dtype=half))
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not can_pack(torch.zeros(4, 0))
