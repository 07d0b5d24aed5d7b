"""Quantized matrices as the operations take them, packed for a GPU, against the operations' own references."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.fp8_linear import Fp8Weight, fp8_linear, pack_fp8
from kernels.fp8_linear import pack as fp8_pack
from kernels.fp8_linear.reference import fp8_linear_reference
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.int4_linear import Int4Weight, int4_linear, pack_int4
from kernels.int4_linear import pack as int4_pack
from kernels.int4_linear.reference import int4_linear_reference
from kernels.int8_linear import (
    Int8GroupWeight,
    Int8Weight,
    int8_group_linear,
    int8_linear,
    pack_int8,
    pack_int8_groups,
)
from kernels.int8_linear import pack as int8_pack
from kernels.int8_linear.reference import int8_group_linear_reference, int8_linear_reference
from kernels.linear.gpu_packed import PackedMatrix
from kernels.linear.gpu_packed import dispatch as packed_dispatch
from kernels.linear.gpu_scaled import ScaledMatrix
from kernels.linear.gpu_scaled import dispatch as scaled_dispatch
from tests.kernels.inline_ptx import interpreted_ptx

ROWS, COLUMNS = 60, 260
# References round weights to float16; kernels do not.
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the device of the tests for a GPU; without one, kernels run in the interpreter."""
    for module in (int4_pack, int8_pack, fp8_pack):
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setattr(fp8_pack, "has_float8", lambda _: True)
    for dispatch in (packed_dispatch, scaled_dispatch):
        monkeypatch.setattr(dispatch, "gpu_of", lambda _: Gpu(GpuGeneration.HOPPER, 132))
    with interpreted_ptx():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(
    packed: object,
    plain: object,
    operation: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    device: torch.device,
) -> None:
    x, bias = random(3, COLUMNS).half(), random(ROWS).half()
    x[1] *= 1e-2
    expected = reference(x, plain, bias, to_float32=True)
    for to_float32 in (True, False):
        actual = operation(x.to(device), packed, bias.to(device), to_float32=to_float32).cpu()
        assert actual.dtype is (torch.float32 if to_float32 else torch.float16)
        assert (actual.float() - expected).norm() < TOLERANCE * expected.norm()


def groups(bits: int, group_size: int, device: torch.device, *, is_ordered: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(256, (ROWS, COLUMNS * bits // 8), generator=generator).to(torch.uint8)
    size = (ROWS, -(-COLUMNS // group_size))
    scales, offsets = torch.rand(size, generator=generator) + 0.1, random(*size)
    order = torch.randperm(COLUMNS, generator=generator) if is_ordered else None
    return (values, scales, offsets, group_size, order)


def on(device: torch.device, parts: tuple) -> tuple:
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in parts)


@pytest.mark.parametrize(("group_size", "is_ordered"), [(32, False), (128, True), (COLUMNS, False)])
def test_packed_groups_multiply_as_the_reference(group_size: int, is_ordered: bool, device: torch.device) -> None:
    parts = groups(4, group_size, device, is_ordered=is_ordered)
    packed = pack_int4(Int4Weight(*on(device, parts)))
    assert isinstance(packed, PackedMatrix)
    check(packed, Int4Weight(*parts), int4_linear, int4_linear_reference, device)
    parts = groups(8, group_size, device, is_ordered=is_ordered)
    packed = pack_int8_groups(Int8GroupWeight(*on(device, parts)))
    assert isinstance(packed, PackedMatrix)
    check(packed, Int8GroupWeight(*parts), int8_group_linear, int8_group_linear_reference, device)


def test_groups_that_no_kernel_has_stay_as_they_are(device: torch.device) -> None:
    parts = groups(4, 20, device)
    weight = Int4Weight(*on(device, parts))
    assert pack_int4(weight) is weight
    check(weight, Int4Weight(*parts), int4_linear, int4_linear_reference, device)


@pytest.mark.parametrize("activation", ["none", "dynamic", "static"])
@pytest.mark.parametrize("scales", [(1, 1), (ROWS, 1)], ids=str)
def test_packed_int8_multiplies_as_the_reference(
    scales: tuple[int, int], activation: str, device: torch.device
) -> None:
    values = (random(ROWS, COLUMNS) * 50).clamp(-128, 127).to(torch.int8)
    parts = (values, random(*scales, seed=1), activation, torch.tensor(0.03) if activation == "static" else None)
    packed = pack_int8(Int8Weight(*on(device, parts)))
    assert isinstance(packed, PackedMatrix if activation == "none" else ScaledMatrix)
    check(packed, Int8Weight(*parts), int8_linear, int8_linear_reference, device)


@pytest.mark.parametrize("activation", ["none", "dynamic", "static"])
@pytest.mark.parametrize("scales", [(1, 1), (ROWS, 1), (1, 3)], ids=str)
def test_packed_float8_multiplies_as_the_reference(
    scales: tuple[int, int], activation: str, device: torch.device
) -> None:
    values = (random(ROWS, COLUMNS) * 50).to(torch.float8_e4m3fn)
    parts = (values, random(*scales, seed=1), activation, torch.tensor(0.01) if activation == "static" else None)
    packed = pack_fp8(Fp8Weight(*on(device, parts)))
    assert isinstance(packed, PackedMatrix if activation == "none" else ScaledMatrix)
    check(packed, Fp8Weight(*parts), fp8_linear, fp8_linear_reference, device)


def test_gpu_without_float8_leaves_inputs_as_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_pack, "has_float8", lambda _: False)
    values, scales = (random(ROWS, COLUMNS) * 50).to(torch.float8_e4m3fn), random(1, 3, seed=1)
    packed = pack_fp8(Fp8Weight(*on(device, (values, scales, "dynamic", None))))
    check(packed, Fp8Weight(values, scales), fp8_linear, fp8_linear_reference, device)
