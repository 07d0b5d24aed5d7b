"""The kernel of quantized matrices against the reference of their forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu_library import CpuLibrary
from kernels.linear.cpu.cpu import MAX_INPUTS, input_layout, pack_quantized, quantized_linear
from kernels.linear.forms import GroupQuantizedWeight, QuantizedWeight, ScaledWeight, integers
from kernels.linear.reference import form_linear_reference
from tests.kernels.poisoned_memory import poisoned_memory

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LEEWAY = 2e-6  # Of sums in float32, beside the sum of the products' magnitudes.


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def groups(
    bits: int, outputs: int, inputs: int, group_size: int, offset: str = "symmetric", *, is_ordered: bool = False
) -> GroupQuantizedWeight:
    """Make a matrix with an outlier and a group of zeros, and offsets as one of the checkpoint formats has them."""
    random = generator(inputs + group_size)
    num_groups = -(-inputs // group_size)
    codes = torch.randint(256, (outputs, inputs * bits // 8), generator=random).to(torch.uint8)
    scales = (torch.rand(outputs, num_groups, generator=random) * 0.02 + 0.001).half().float()
    scales[0, 0] *= 256
    scales[1, -1] = 0
    if offset == "symmetric":
        offsets = 0 - scales * 2 ** (bits - 1)
    elif offset == "zeros":
        offsets = 0 - scales * torch.randint(2**bits, scales.shape, generator=random)
    else:
        offsets = torch.randn(scales.shape, generator=random) * 0.1
        scales *= 1.0001  # Not a number of 16 bits.
    order = torch.randperm(inputs, generator=random) if is_ordered else None
    return GroupQuantizedWeight(codes, integers(bits), group_size, scales, offsets, order)


def scaled(dtype: torch.dtype, outputs: int, inputs: int, scales: tuple[int, int], activation: str) -> QuantizedWeight:
    random = generator(inputs)
    values = (torch.randn(outputs, inputs, generator=random) * 40).clamp(-127, 127)
    values[:, ::7] /= 4096
    scale = torch.tensor(0.03) if activation == "static" else None
    numbers = torch.rand(*scales, generator=random) * 0.01 + 0.001
    return ScaledWeight(values.to(dtype), numbers, activation, scale)  # type: ignore[arg-type]


def multiply(library: CpuLibrary, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    with poisoned_memory():
        return quantized_linear(x, pack_quantized(library, weight, bias), to_float32=True)


def inputs_with_outliers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=generator(rows))
    x[:, 3] *= 20
    x[0, :40] = 0
    x[-1] *= 1e-3
    return x.to(dtype)


def in_segments(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return columns in the weight's order, divided as the kernel rounds them: 32 of them, or 16, at a time."""
    order = getattr(weight, "input_order", None)
    segment = 16 if getattr(weight, "group_size", 32) == 16 else 32
    columns = x if order is None else x[:, order]
    return F.pad(columns, (0, -x.shape[1] % segment)).unflatten(1, (-1, segment))


def from_segments(parts: torch.Tensor, like: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    columns, order = parts.flatten(1)[:, : like.shape[1]], getattr(weight, "input_order", None)
    return columns if order is None else torch.empty_like(columns).index_copy_(1, order, columns)


def without_ties(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Make zeros of numbers half way between two steps: which one they become depends on the processor.

    They are multiplied by the inverse of a step, which is a rounded number; some round the product before they round to
    integers, others do both at once.
    """
    parts = in_segments(x, weight)
    half_steps = parts.double() * 254 / parts.abs().amax(2, keepdim=True)
    return from_segments(parts.masked_fill(half_steps % 2 == 1, 0), x, weight)


def as_integers(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Round inputs as the kernel promises for bfloat16: to steps of 1/127 of the largest of 32 columns, or of 16."""
    parts = in_segments(x.float(), weight)
    largest = parts.abs().amax(2, keepdim=True)
    steps = (parts.double() * 127 / largest).nan_to_num().round()
    rounded = steps.float() * (largest / 127)
    assert ((rounded - parts).abs() <= parts.abs().amax() / 253).all()
    return from_segments(rounded, x, weight)


def check(library: CpuLibrary, weight: QuantizedWeight, given: torch.Tensor, x: torch.Tensor) -> None:
    """Compare the product of `x` with the reference's of `given`, to the last bits of a sum in float32."""
    bias = torch.randn(weight.values.shape[0], generator=generator(1))
    result = multiply(library, x, weight, bias)
    expected = form_linear_reference(given, weight, bias, to_float32=True)
    matrix = weight.dequantize().T
    size = given.float().abs() @ matrix.abs() + bias.abs()
    assert ((result - expected).abs() <= LEEWAY * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", ["symmetric", "zeros", "free"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group_size"),
    [
        (1, 64, 97, 16),
        (4, 74, 40, 16),
        (2, 96, 64, 32),
        (5, 200, 70, 64),
        (13, 384, 130, 128),
        (3, 90, 5, 90),
        (7, 62, 33, 256),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_product_of_groups_equals_reference(
    library: CpuLibrary,
    bits: int,
    rows: int,
    inputs: int,
    outputs: int,
    group_size: int,
    offset: str,
    dtype: torch.dtype,
) -> None:
    weight, x = groups(bits, outputs, inputs, group_size, offset), inputs_with_outliers(rows, inputs, dtype)
    x = without_ties(x, weight)
    check(library, weight, as_integers(x, weight) if dtype is torch.bfloat16 else x.float(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "dynamic", "static"])
@pytest.mark.parametrize(
    ("values", "scales"),
    [(torch.int8, (1, 1)), (torch.int8, (130, 1))] + [(torch.float8_e4m3fn, s) for s in [(1, 1), (130, 1), (2, 3)]],
    ids=str,
)
def test_product_of_scaled_values_equals_reference(
    library: CpuLibrary, values: torch.dtype, scales: tuple[int, int], activation: str, dtype: torch.dtype
) -> None:
    weight, x = scaled(values, 130, 300, scales, activation), inputs_with_outliers(9, 300, dtype)
    x = without_ties(x, weight)
    is_rounded = values is torch.int8 and activation == "none" and dtype is torch.bfloat16
    check(library, weight, as_integers(x, weight) if is_rounded else x.float(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_follow_the_order_of_the_input(library: CpuLibrary, bits: int, dtype: torch.dtype) -> None:
    weight, x = groups(bits, 40, 192, 32, is_ordered=True), inputs_with_outliers(3, 192, dtype)
    x = without_ties(x, weight)
    check(library, weight, as_integers(x, weight) if dtype is torch.bfloat16 else x.float(), x)


def test_all_float8_numbers_are_exact(library: CpuLibrary) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), 0, codes.float()).to(torch.float8_e4m3fn)
    weight = ScaledWeight(codes[:, None].repeat(1, 32), torch.ones(1, 1))
    for dtype in DTYPES:
        x = torch.zeros(1, 32, dtype=dtype)
        x[0, 5] = 1
        assert torch.equal(multiply(library, x, weight, None)[0], codes.float())


EACH = {
    "4 bits": groups(4, 200, 128, 64),
    "8 bits": groups(8, 200, 128, 32, "free"),
    "int8": scaled(torch.int8, 200, 128, (200, 1), "dynamic"),
    "float8": scaled(torch.float8_e4m3fn, 200, 128, (200, 1), "dynamic"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_row_does_not_depend_on_batch_or_threads(library: CpuLibrary, name: str, dtype: torch.dtype) -> None:
    x, packed = inputs_with_outliers(101, 128, dtype), pack_quantized(library, EACH[name])
    together = quantized_linear(x, packed)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        parallel = quantized_linear(x, packed)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(parallel, together)
    for row in (0, 5, 6, 96, 100):
        assert torch.equal(quantized_linear(x[row : row + 1], packed)[0], together[row])
    for rows in range(2, 7):
        assert torch.equal(quantized_linear(x[:rows], packed), together[:rows])


@pytest.mark.parametrize("name", EACH)
def test_not_a_number_stays_one(library: CpuLibrary, name: str) -> None:
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    result = multiply(library, x, EACH[name], None)
    assert result[0].isfinite().all()
    assert result[1].isnan().all()


def test_weights_take_no_more_memory_than_their_bits(library: CpuLibrary) -> None:
    packed = pack_quantized(library, groups(4, 256, 1024, 64))
    assert packed.num_bytes == 256 * (1024 // 2 + 1024 // 64 * 2)


def test_unsupported_matrices_are_refused() -> None:
    assert None is input_layout(groups(4, 8, 48, 24))
    assert None is input_layout(ScaledWeight(torch.zeros(1, MAX_INPUTS + 32, dtype=torch.int8), torch.ones(1, 1)))
    assert None is input_layout(ScaledWeight(torch.zeros(1, 32, dtype=torch.int8, device="meta"), torch.ones(1, 1)))
