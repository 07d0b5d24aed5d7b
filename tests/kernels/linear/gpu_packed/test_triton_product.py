"""Products with packed matrices against float64 arithmetic on the numbers that the matrices stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.forms import INT4, INT8, NUMBERS, CodedMatrix, Number
from kernels.linear.gpu_packed import PackedMatrix, can_pack, dispatch, pack_matrix, packed_linear
from kernels.linear.gpu_packed.matrix import (
    FUSED_ROWS,
    PACKED_LINEAR,
    is_fused,
    packed_linear_launch,
    packed_linear_splits,
)
from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton
from kernels.linear.gpu_packed.triton_product import packed_linear_triton
from kernels.linear.gpu_packed.triton_unpack import assembly
from kernels.linear.product_launch import ProductLaunch
from tests.kernels.compile_checks import CAPABILITIES, CompiledKernel, compile_launches, instructions_of
from tests.kernels.inline_ptx import DTYPES, run_ptx
from tests.kernels.packed_linear_launches import describe
from tests.kernels.poisoned_memory import poisoned_memory

pytestmark = pytest.mark.usefixtures("assembly_runs")
H200 = Gpu(GpuGeneration.HOPPER, 132)
SMALL = ProductLaunch(block_m=16, block_n=64, num_warps=4, num_stages=2)
# Weights are multiplied unrounded and summed in float32; the result is rounded.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Plain:
    """A quantized matrix before packing."""

    number: Number
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group_size: int
    order: torch.Tensor | None = None

    def pack(self, device: torch.device) -> PackedMatrix:
        values, scales, offsets, order = (
            None if part is None else part.to(device) for part in (self.values, self.scales, self.offsets, self.order)
        )
        return pack_matrix(CodedMatrix(self.number, values, scales, offsets, self.group_size, order))

    def numbers(self) -> torch.Tensor:
        """The matrix in float64, its columns as they are."""
        columns = self.values.shape[1]

        def spread(parts: torch.Tensor) -> torch.Tensor:
            return parts.double().repeat_interleave(self.group_size, dim=1)[:, :columns]

        numbers = self.number.decode(self.values).double() * spread(self.scales)
        return numbers if self.offsets is None else numbers + spread(self.offsets)


def random_matrix(number: Number, rows: int, columns: int, group_size: int, *, is_symmetric: bool = False) -> Plain:
    generator = torch.Generator().manual_seed(rows + columns + group_size)
    size = (rows, -(-columns // group_size))
    scales = torch.rand(size, generator=generator) + 0.1
    values = torch.randint(2**number.bits, (rows, columns), generator=generator).to(torch.uint8)
    if not number.is_integer:
        values[number.decode(values).isnan()] = 0
        return Plain(number, values, scales, None, group_size)
    offsets = -number.centre * scales if is_symmetric else torch.randn(size, generator=generator)
    return Plain(number, values, scales, offsets, group_size)


def check(
    plain: Plain, device: torch.device, dtype: torch.dtype, *, num_rows: int = 3, num_splits: int | None = 1
) -> None:
    """Multiply rows that lie in memory full of NaN, twice: the second launch finds counters as the first left them."""
    rows, columns = plain.values.shape
    generator = torch.Generator().manual_seed(num_rows)
    padded = torch.full((num_rows + 1, columns + 8), float("nan"), dtype=dtype)
    inputs = padded[:num_rows, :columns].copy_(torch.randn(num_rows, columns, generator=generator))
    bias = torch.randn(rows, generator=generator)
    matrix = plain.pack(device)
    expected = inputs.double() @ plain.numbers().T + bias.double()
    config = SMALL if device.type == "cpu" else None
    for out_dtype in (dtype, torch.float32):
        with poisoned_memory():
            actual = packed_linear_triton(
                padded.to(device)[:num_rows, :columns], matrix, bias.to(device), out_dtype, H200, config, num_splits
            )
        assert actual.dtype is out_dtype
        error = (actual.cpu().double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[out_dtype]
    assert matrix.counters.count_nonzero() == 0


@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 96, 128, 256, 1000])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_groups_of_every_size_equal_exact_product(number: Number, group_size: int, device: torch.device) -> None:
    check(random_matrix(number, 70, 330, group_size), device, torch.float16)


@pytest.mark.parametrize(("num_rows", "num_splits"), [(1, 1), (3, 2), (16, 3), (17, 1)])
def test_rows_and_splits_equal_exact_product(num_rows: int, num_splits: int, device: torch.device) -> None:
    for is_symmetric in (True, False):
        plain = random_matrix(INT4, 70, 520, 128, is_symmetric=is_symmetric)
        check(plain, device, torch.float16, num_rows=num_rows, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_rows_of_both_types_equal_exact_product(
    number: Number, dtype: torch.dtype, num_rows: int, device: torch.device
) -> None:
    for group_size in (16, 32, 128, 4096):
        for shape in ((4096, 4096), (1003, 1001)):
            check(random_matrix(number, *shape, group_size), device, dtype, num_rows=num_rows, num_splits=None)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_extreme_groups_equal_exact_product(number: Number, device: torch.device) -> None:
    plain = random_matrix(number, 64, 256, 32)
    plain.scales[:, 1] = 0
    plain.scales[5, 2] = 20
    if plain.offsets is not None:
        plain.offsets[:, 1] = 0
        plain.offsets[7, 3] = -50
    plain.values[9] = 0
    check(plain, device, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_written_out_matrix_is_the_numbers_rounded_once(
    number: Number, dtype: torch.dtype, device: torch.device
) -> None:
    plain = random_matrix(number, 70, 330, 96)
    with poisoned_memory():
        actual = dequantize_triton(plain.pack(device), dtype)
    # Values of up to 280 that are sums of three numbers, the last rounding included.
    rtol = 3e-7 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(actual.cpu(), plain.numbers().to(dtype), rtol=rtol, atol=3e-5)


def test_symmetric_matrix_has_no_offsets(device: torch.device) -> None:
    for number in NUMBERS:
        assert random_matrix(number, 10, 64, 32, is_symmetric=True).pack(device).offsets is None
    assert random_matrix(INT4, 10, 64, 32).pack(device).offsets is not None


def test_codes_around_another_zero_are_moved_and_need_no_offsets(device: torch.device) -> None:
    plain = random_matrix(INT8, 70, 330, 16)
    six_bits = dataclasses.replace(plain, values=plain.values & 63, offsets=-32 * plain.scales)
    assert six_bits.pack(device).offsets is None
    check(six_bits, device, torch.float16)
    # Eight bits do not fit when they are moved, and a zero of one group is not that of the others.
    for values, offsets in ((plain.values, -32 * plain.scales), (plain.values & 63, plain.offsets)):
        other = dataclasses.replace(plain, values=values, offsets=offsets)
        assert other.pack(device).offsets is not None
        check(other, device, torch.float16)


def test_row_does_not_depend_on_the_others(device: torch.device) -> None:
    matrix = random_matrix(INT4, 64, 512, 128).pack(device)
    inputs = torch.randn(7, 512, generator=torch.Generator().manual_seed(0)).half().to(device)
    together, alone = (
        packed_linear_triton(rows, matrix, None, torch.float16, H200, SMALL, 2) for rows in (inputs, inputs[4:5])
    )
    assert torch.equal(together[4:5], alone)


@pytest.mark.parametrize("num_rows", [0, 2, FUSED_ROWS["HOPPER"] + 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_ordered_columns_multiply_their_inputs(
    dtype: torch.dtype, num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: H200)
    plain = random_matrix(INT4, 20, 96, 32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    matrix = Plain(plain.number, plain.values, plain.scales, plain.offsets, 32, order).pack(device)
    inputs = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(20).to(dtype)
    for to_float32 in (False, True):
        actual = packed_linear(inputs.to(device), matrix, bias.to(device), to_float32=to_float32).cpu()
        assert actual.dtype is (torch.float32 if to_float32 else dtype)
        expected = inputs[:, order].double() @ plain.numbers().T + bias.double()
        assert actual.shape == expected.shape
        assert (actual - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_instructions_unpack_every_word_exactly(number: Number, dtype: str) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    bits = number.bits
    for plane in range(16 // bits):
        source = assembly(number.name, {"bf16x2": "bf16", "f16x2": "fp16"}[dtype], plane)
        (result,) = run_ptx(source, [words.view(np.uint32)], 1)
        actual = torch.from_numpy(result.view(np.int16).copy()).view(DTYPES[dtype]).float()
        values = torch.from_numpy((words >> (bits * plane) & (2**bits - 1)).astype(np.uint8))
        expected = number.decode(values) - number.centre
        is_number = ~expected.isnan()
        assert torch.equal(actual[is_number], expected[is_number])


def test_groups_that_planes_cannot_hold_are_not_packed() -> None:
    for group_size, columns, is_possible in (
        (32, 4096, True),
        (4096, 4096, True),
        (1000, 1000, True),
        (40, 4096, False),
    ):
        codes, scales = torch.zeros(1, columns, dtype=torch.uint8), torch.zeros(1, -(-columns // group_size))
        assert can_pack(CodedMatrix(INT8, codes, scales, None, group_size)) is is_possible


@pytest.mark.parametrize("generation", GpuGeneration)
def test_table_has_an_entry_for_every_number_of_rows(generation: GpuGeneration) -> None:
    entries = PACKED_LINEAR[generation.name]
    assert list(entries) == sorted(entries)
    for num_rows in (1, 16, 17, 64, 1000):
        launch = packed_linear_launch(generation, num_rows)
        assert launch.block_m >= min(num_rows, max(entries))
    assert [packed_linear_launch(generation, limit).block_m for limit in (16, 32, 64)] == [16, 32, 64]
    assert is_fused(generation, 64)
    assert not is_fused(generation, 2048)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 64, 65])
def test_splits_fill_the_gpu(shape: tuple[int, int], num_rows: int) -> None:
    matrix = describe(INT4, *shape, 128, False)
    launch = packed_linear_launch(GpuGeneration.HOPPER, num_rows)
    splits = packed_linear_splits(launch, H200, num_rows, matrix)
    assert 1 <= splits <= (8 if num_rows <= 64 else 1)
    if num_rows == 1:
        assert splits * -(-shape[0] // launch.block_n) > 0.8 * H200.num_multiprocessors


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    output = tmp_path_factory.mktemp("compiled") / "packed"
    return compile_launches("tests.kernels.packed_linear_launches", CAPABILITIES, output)


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_kernels_fit_the_gpu(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        # Sums of inputs, beside those of products, take the last registers of mma.sync at 64 rows.
        is_full = kernel.launch == "int4_offsets_64" and instructions_of(kernel.capability) == {"mma"}
        kernel.check_fits(80 if is_full else 0)


@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_weights_are_unpacked_in_the_registers_of_the_matrix_instruction(compiled: list[CompiledKernel]) -> None:
    products = [kernel for kernel in compiled if kernel.kernel == "packed_linear_kernel"]
    assert len(products) == 13 * len(CAPABILITIES)
    for kernel in products:
        assert kernel.matrix_instructions == instructions_of(kernel.capability), kernel
        # The first operand of wgmma is four registers, not a description of shared memory.
        is_hopper = kernel.capability == 90
        assert (kernel.count(r"wgmma\.mma_async\S+ \{[^}]*\}, \{[^}]*\},") > 0) == is_hopper, kernel
        assert kernel.count(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,") > 0, kernel
        assert kernel.count(r"ldmatrix") > 0 or kernel.matrix_instructions == {"tcgen05"}, kernel
        assert kernel.count(r"fma\.rn\.b?f16x2") > 0, kernel
        if kernel.launch.startswith("int4_1"):
            assert kernel.count(r"atom\.global\.gpu\.acq_rel\.add") == 1, kernel
