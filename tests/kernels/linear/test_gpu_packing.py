"""Quantized matrices as checkpoints give them, packed for a GPU, against the reference of their forms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear import Linear, LinearFactory, factory
from kernels.linear.forms import Activation, GroupQuantizedWeight, QuantizedWeight, ScaledWeight, WeightForm, integers
from kernels.linear.gpu_packed import PackedMatrix, pack_for_gpu
from kernels.linear.gpu_packed import dispatch as packed_dispatch
from kernels.linear.gpu_packed import pack as packed_pack
from kernels.linear.gpu_scaled import ScaledMatrix, scale_for_gpu
from kernels.linear.gpu_scaled import dispatch as scaled_dispatch
from kernels.linear.gpu_scaled import matrix as scaled_matrix
from kernels.linear.reference import form_linear_reference
from tests.kernels.inline_ptx import interpreted_ptx

ROWS, COLUMNS = 60, 260
# References round weights to float16; kernels do not.
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the device of the tests for a GPU; without one, kernels run in the interpreter."""
    for module in (packed_pack, scaled_matrix):
        monkeypatch.setattr(module, "has_kernels", lambda _: True)
    monkeypatch.setattr(factory, "pack_quantized_weight", lambda *_: None)
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setattr(scaled_matrix, "has_float8", lambda _: True)
    for dispatch in (packed_dispatch, scaled_dispatch):
        monkeypatch.setattr(dispatch, "gpu_of", lambda _: Gpu(GpuGeneration.HOPPER, 132))
    with interpreted_ptx():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer(form: WeightForm, bias: torch.Tensor) -> Linear:
    return LinearFactory(lambda: 0).make(form, bias)


def check(form: QuantizedWeight, expected_form: QuantizedWeight, device: torch.device) -> None:
    x, bias = random(3, COLUMNS).half(), random(ROWS).half()
    x[1] *= 1e-2
    expected = form_linear_reference(x, expected_form, bias, to_float32=True)
    linear = layer(form.to(device), bias.to(device))
    for result, dtype in ((linear(x.to(device)), torch.float16), (linear.to_float32(x.to(device)), torch.float32)):
        assert result.dtype is dtype
        assert (result.cpu().float() - expected).norm() < TOLERANCE * expected.norm()


def groups(bits: int, group_size: int, *, is_ordered: bool = False) -> GroupQuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(256, (ROWS, COLUMNS * bits // 8), generator=generator).to(torch.uint8)
    size = (ROWS, -(-COLUMNS // group_size))
    scales, offsets = torch.rand(size, generator=generator) + 0.1, random(*size)
    order = torch.randperm(COLUMNS, generator=generator) if is_ordered else None
    return GroupQuantizedWeight(values, integers(bits), group_size, scales, offsets, order)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "is_ordered"), [(16, False), (32, False), (128, True), (COLUMNS, False)])
def test_packed_groups_multiply_as_the_reference(
    group_size: int, is_ordered: bool, bits: int, device: torch.device
) -> None:
    form = groups(bits, group_size, is_ordered=is_ordered)
    assert scale_for_gpu(form.to(device)) is None
    assert isinstance(pack_for_gpu(form.to(device)), PackedMatrix)
    check(form, form, device)


def test_groups_that_no_kernel_has_are_multiplied_by_the_formula(device: torch.device) -> None:
    form = groups(4, 20)
    assert pack_for_gpu(form.to(device)) is None
    check(form, form, device)


def scaled(dtype: torch.dtype, scales: tuple[int, int], activation: Activation, scale: float) -> ScaledWeight:
    values = (random(ROWS, COLUMNS) * 50).clamp(-128, 127).to(dtype)
    return ScaledWeight(
        values, random(*scales, seed=1), activation, torch.tensor(scale) if activation == "static" else None
    )


@pytest.mark.parametrize("activation", ["none", "dynamic", "static"])
@pytest.mark.parametrize(
    ("dtype", "scales", "scale"),
    [(torch.int8, scales, 0.03) for scales in [(1, 1), (ROWS, 1)]]
    + [(torch.float8_e4m3fn, scales, 0.01) for scales in [(1, 1), (ROWS, 1), (1, 3)]],
    ids=str,
)
def test_packed_bytes_multiply_as_the_reference(
    dtype: torch.dtype, scales: tuple[int, int], scale: float, activation: Activation, device: torch.device
) -> None:
    form = scaled(dtype, scales, activation, scale)
    assert isinstance(scale_for_gpu(form.to(device)), ScaledMatrix) is (activation != "none")
    check(form, form, device)


def test_gpu_without_float8_leaves_inputs_as_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_matrix, "has_float8", lambda _: False)
    form = scaled(torch.float8_e4m3fn, (1, 3), "dynamic", 0.0)
    check(form, ScaledWeight(form.values, form.scales), device)
