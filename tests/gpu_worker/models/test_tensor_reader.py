"""Reading: pieces that do not divide the tensor, every type, in whatever order, against the format's own library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.json_file import CheckpointError, JsonFile, is_inside, read_small_file
from gpu_worker.models.tensor_file import DTYPES, TensorFile
from gpu_worker.models.tensor_reader import TensorReader
from gpu_worker.text.model_directory import read_json
from shared.errors import ConfigError

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
        tensors[f"normal-{name}"] = torch.randn(61, 37, generator=generator).to(DTYPES[name])
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


def test_content_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 0 MiB"):
        read_small_file(path, 4)


def test_file_that_takes_no_room_on_the_disk_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        read_json(path)
    with pytest.raises(CheckpointError, match="larger than 64 MiB"):
        JsonFile.read(path)


def test_device_without_end_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not an ordinary file"):
        JsonFile.read(path)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not an ordinary file"):
        read_small_file(path)


def test_links_of_the_hub_lead_to_files_of_the_model(tmp_path: Path) -> None:
    """Its library keeps contents beside the revisions that link to them."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "r1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0f").touch()
    (snapshot / "own").touch()
    (snapshot / "kept").symlink_to("../../blobs/0f")
    (snapshot / "other").symlink_to("../../../other/blobs/0f")
    assert [is_inside(snapshot / name, snapshot) for name in ("own", "kept", "other")] == [True, True, False]
    (tmp_path / "linked").symlink_to(snapshot)
    assert is_inside(tmp_path / "linked" / "own", tmp_path / "linked")
