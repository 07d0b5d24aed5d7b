"""When a NATS server that complains of a full disk is started anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ops.stack import liveness
from ops.stack.liveness import ROOM_BYTES, StorageWatch

COMPLAINT = (
    b"[1] [ERR] JetStream failed to store a msg on stream '$G > HR_RESULTS': write 1.blk: no space left on device"
)


def rounds(watch: StorageWatch, *seen: tuple[bool, int]) -> list[bool]:
    """What each round finds, in which the server complained or not, and so much was free at its end."""
    found = []
    for complains, free_bytes in seen:
        watch.note_line(COMPLAINT if complains else b"[1] [INF] Server is ready")
        found.append(watch.note_round(free_bytes))
    return found


def watching() -> StorageWatch:
    return StorageWatch(Path("/"), lambda: None)


def test_server_that_complains_on_while_there_is_room_is_replaced() -> None:
    seen = [(True, 0), (True, 0), (True, ROOM_BYTES), (True, ROOM_BYTES)]
    assert rounds(watching(), *seen) == [False, False, False, True]


def test_server_that_complains_of_a_full_disk_is_left_alone() -> None:
    assert not any(rounds(watching(), *[(True, ROOM_BYTES - 1)] * 100))


def test_complaint_from_before_there_was_room_is_no_reason() -> None:
    assert rounds(watching(), (True, 0), (True, ROOM_BYTES), (False, ROOM_BYTES)) == [False] * 3


def test_server_that_says_nothing_of_it_is_left_alone() -> None:
    assert not any(rounds(watching(), *[(False, ROOM_BYTES)] * 100))


def test_replaced_server_is_given_a_round() -> None:
    assert rounds(watching(), *[(True, ROOM_BYTES)] * 5) == [False, True, False, True, False]


async def test_running_watch_replaces_the_server_while_its_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "STORAGE_ROUND_S", 0.01)
    replaced = asyncio.Event()
    watch = StorageWatch(tmp_path, replaced.set)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(10):
        while not replaced.is_set():
            watch.note_line(COMPLAINT)
            await asyncio.sleep(0.001)
    running.cancel()


async def test_watch_goes_on_where_the_directory_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = asyncio.Event()

    def usage(directory: Path) -> None:
        looks.set() if is_deleted.is_set() else is_deleted.set()
        raise FileNotFoundError(directory)

    is_deleted = asyncio.Event()
    monkeypatch.setattr(liveness, "STORAGE_ROUND_S", 0.01)
    monkeypatch.setattr("shutil.disk_usage", usage)
    running = asyncio.create_task(StorageWatch(tmp_path, lambda: None).run())
    async with asyncio.timeout(10):
        await looks.wait()
    running.cancel()
