from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile, is_inside, read_small_file
from gpu_worker.text.model_directory import read_json
from shared.errors import ConfigError


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
    with pytest.raises(CheckpointError, match="no ordinary file"):
        JsonFile.read(path)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no ordinary file"):
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
