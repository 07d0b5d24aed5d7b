"""Every number that weights can be stored as: its codes, and groups of them on a CPU and packed for a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.linear import LinearFactory, OperationLinear
from kernels.linear.cpu import QuantizedPanels
from kernels.linear.cpu.cpu import input_layout
from kernels.linear.forms import FLOAT4, NUMBERS, GroupQuantizedWeight, Number
from kernels.linear.panels import pack_panels
from kernels.linear.reference import form_linear_reference

EACH = pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
# Inputs in bfloat16 are rounded to eight bits, 32 at a time, where weights are integers.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


def random_codes(number: Number, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(2**number.bits, (rows, columns), generator=generator).to(torch.uint8)
    codes[number.decode(codes).isnan()] = 0
    return codes


def groups(number: Number, group_size: int, rows: int = 37, columns: int = 192) -> GroupQuantizedWeight:
    """Make a matrix that no offset but that of the integers' centre belongs to."""
    scales = torch.rand(rows, -(-columns // group_size), generator=torch.Generator().manual_seed(1)) + 0.1
    values = number.pack(random_codes(number, rows, columns))
    return GroupQuantizedWeight(values, number, group_size, scales, 0 - number.centre * scales)


@EACH
def test_packed_codes_are_unpacked_again(number: Number) -> None:
    codes = random_codes(number, 3, 16)
    assert number.pack(codes).shape == (3, 16 // number.per_byte)
    assert torch.equal(number.unpack(number.pack(codes)), codes)


def test_names_and_indices_are_unique() -> None:
    assert len({number.name for number in NUMBERS}) == len(NUMBERS)
    assert [number.index for number in NUMBERS] == list(range(len(NUMBERS)))


@EACH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 192])
def test_groups_on_a_cpu_multiply_as_the_reference(number: Number, group_size: int, dtype: torch.dtype) -> None:
    form = groups(number, group_size)
    linear = LinearFactory(lambda: 0).make(form)
    assert isinstance(linear, OperationLinear)
    assert isinstance(linear.multiply, partial)
    assert isinstance(linear.multiply.keywords["packed"], QuantizedPanels)
    for rows in (1, 5, 20):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = form_linear_reference(x.float(), form)
        actual = linear.to_float32(x)
        assert (actual - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@EACH
def test_groups_that_the_cpu_kernel_does_not_know_become_dense(number: Number) -> None:
    form, library = groups(number, 24), cpu_library()
    assert library is not None, "the tests need g++"
    assert input_layout(form) is None
    packed = pack_panels(library, form, torch.float32)
    assert (packed.num_inputs, packed.num_outputs) == (192, 37)


def test_floating_point_groups_with_offsets_are_not_packed() -> None:
    for number in NUMBERS:
        form = groups(number, 32)
        assert form.offsets is not None
        form.offsets[3, 1] = 0.5
        assert (input_layout(form) is not None) is number.is_integer


def test_four_bit_floats_are_those_of_the_microscaling_formats() -> None:
    def value(code: int) -> float:
        """Sign, two bits of exponent with a bias of one, one of fraction; without leading one where those are zero."""
        exponent, fraction = code >> 1 & 3, code & 1
        magnitude = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
        return -magnitude if code & 8 else magnitude

    codes = torch.arange(16, dtype=torch.uint8)
    assert FLOAT4.decode(codes).tolist() == [value(code) for code in range(16)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_microscaled_groups_equal_those_with_scales_in_float32(dtype: torch.dtype) -> None:
    exponents = torch.randint(110, 130, (37, 6), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    values = FLOAT4.pack(random_codes(FLOAT4, 37, 192))
    form = GroupQuantizedWeight(values, FLOAT4, 32, exponents.view(torch.float8_e8m0fnu))
    plain = GroupQuantizedWeight(values, FLOAT4, 32, torch.exp2(exponents.float() - 127), torch.zeros(37, 6))
    assert torch.equal(form.dequantize(), plain.dequantize())
    assert form.num_bytes == 37 * (96 + 6)
    factory = LinearFactory(lambda: 0)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(factory.make(form)(x), factory.make(plain)(x))
    joined = form.join(form)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([plain.dequantize()] * 2))
    assert form.join(plain) is None
    both = plain.join(groups(FLOAT4, 32, 1))
    assert both is not None
    assert both.shape == (38, 192)
