"""Reading: pieces that do not divide the tensor, every type, in whatever order, against the format's own library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.tensor_file import DTYPES, TensorFile
from gpu_worker.models.tensor_reader import TensorReader

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Odd numbers of elements, more pieces than there are buffers, and nothing at all.
SHAPES = [(1,), (), (0, 7), (33, 31), (257, 129), (5, 3, 11)]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TensorFile]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            values = torch.randint(0, 2, shape, generator=generator, dtype=torch.int64)
            tensors[f"{name}-{list(shape)}"] = values.to(dtype)
    for name in ("F32", "F16", "BF16"):
        tensors[f"normal-{name}"] = torch.randn(211, 97, generator=generator).to(DTYPES[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    opened = TensorFile(tmp_path / "model.safetensors")
    yield opened
    opened.close()


def _assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.cpu().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece_bytes", [256, 1000, 1 << 20])
def test_every_type_is_read_as_it_is(file: TensorFile, device: str, piece_bytes: int) -> None:
    expected = load_file(file.path)
    assert file.tensors.keys() == expected.keys()
    reader = TensorReader(torch.device(device), piece_bytes)
    for name in reversed(list(expected)):
        stored = file.tensors[name]
        assert stored.dtype == expected[name].dtype
        out = torch.empty(stored.shape, dtype=expected[name].dtype, device=device)
        reader.read(file, stored, out)
        _assert_equal(out, expected[name])
    reader.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_converted_piece_by_piece(file: TensorFile, device: str, dtype: torch.dtype) -> None:
    expected = load_file(file.path)
    reader = TensorReader(torch.device(device), 1000)
    for name in ("normal-F32", "normal-F16", "normal-BF16"):
        out = torch.full(expected[name].shape, float("nan"), dtype=dtype, device=device)
        reader.read(file, file.tensors[name], out)
        _assert_equal(out, expected[name].to(dtype))
    reader.close()


def test_header_that_promises_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes().replace(b"[64]", b"[65]"))
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        TensorFile(path)
