import os
import threading
import time
from pathlib import Path

import pytest

from gpu_worker.start import read_ahead as room
from gpu_worker.start.read_ahead import read_ahead

SIZE = 3 << 20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of weights that is on the disk, and not in memory."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _bytes_in_memory(path):
        pytest.skip("this file system has no cache that can be emptied")
    return path


def _bytes_in_memory(path: Path) -> int:
    """Return how much of a file can be read without its disk."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(SIZE)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0


def test_weights_are_fetched_before_anybody_reads_them(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_WINDOW_BYTES", 64 << 10)
    read_ahead(weights.parent)
    deadline = time.monotonic() + 10
    while _bytes_in_memory(weights) < SIZE:
        assert time.monotonic() < deadline, f"only {_bytes_in_memory(weights)} bytes are there"
        time.sleep(0.01)


def test_weights_that_memory_has_no_room_for_are_left_to_the_loader(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_host_bytes", lambda: 2 * SIZE)
    read_ahead(weights.parent)
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["missing", "pipe"])
def test_what_is_no_file_is_left_to_the_loader(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    read_ahead(tmp_path / name)
    assert not any(thread.name == "read-ahead" and thread.is_alive() for thread in threading.enumerate())
