"""Loading a block beside an engine: its thread is not made to wait for a turn after each step of the load."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from gpu_worker.execution.memory.block_bytes import _HostBlockBytes
from gpu_worker.execution.tiers.file_format import Maker

LAYERS, BLOCKS, BLOCK_BYTES = 3, 5, 7000
MAKER = Maker(b"w" * 32, (b"l" * 32,))


def make_blocks() -> tuple[_HostBlockBytes, list[torch.Tensor]]:
    tensors = [torch.zeros(LAYERS, BLOCKS, BLOCK_BYTES // size, dtype=kind) for size, kind in KINDS]
    return _HostBlockBytes([(tensor, LAYERS) for tensor in tensors], BLOCKS, "layout"), tensors


KINDS = ((1, torch.uint8), (2, torch.int16))


@pytest.fixture
def turns() -> Iterator[Callable[[], int]]:
    """Count the turns of another thread, which gets one where this thread lets it run, and takes none."""
    before, count, is_over = sys.getswitchinterval(), 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not is_over.is_set():
            count += 1
            time.sleep(1e-6)

    sys.setswitchinterval(60.0)
    thread = threading.Thread(target=run)
    thread.start()
    yield lambda: count
    is_over.set()
    thread.join()
    sys.setswitchinterval(before)


def test_small_row_is_verified_and_written_without_giving_up_the_turn(turns: Callable[[], int]) -> None:
    blocks, tensors = make_blocks()
    row = np.random.default_rng(1).integers(0, 256, blocks.row_bytes, dtype=np.uint8)
    data = MAKER.header(0, b"d" * 32, b"salt", row.data) + row.tobytes()
    time.sleep(0.01)
    before, ends_at = turns(), time.monotonic() + 0.05
    assert before
    while time.monotonic() < ends_at:
        payload = MAKER.payload(data, 0, b"d" * 32, b"salt", blocks.row_bytes)
        assert payload is not None
        blocks.write(2, np.frombuffer(payload, dtype=np.uint8), None)
    assert turns() == before
    written = [tensor[:, 2].reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    assert np.array_equal(np.concatenate(written), row)
    assert not any(tensor[:, [0, 1, 3, 4]].any() for tensor in tensors)


def test_large_row_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("memory.block_bytes._SMALL_ROW_BYTES", "tiers.file_format._SMALL_BYTES"):
        monkeypatch.setattr(f"gpu_worker.execution.{module}", 100)
    blocks, tensors = make_blocks()
    row = np.random.default_rng(1).integers(0, 256, blocks.row_bytes, dtype=np.uint8)
    data = MAKER.header(0, b"d" * 32, b"salt", row.data) + row.tobytes()
    monkeypatch.undo()
    payload = MAKER.payload(data, 0, b"d" * 32, b"salt", blocks.row_bytes)
    assert payload is not None, "both ways to sum are the same"
    monkeypatch.setattr("gpu_worker.execution.memory.block_bytes._SMALL_ROW_BYTES", 100)
    blocks.write(2, np.frombuffer(payload, dtype=np.uint8), None)
    written = [tensor[:, 2].reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    assert np.array_equal(np.concatenate(written), row)
