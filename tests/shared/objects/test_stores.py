"""The directory and the bucket keep the same promises."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from shared.errors import ConfigError
from shared.objects import directory
from shared.objects.directory import DirectoryStore
from shared.objects.s3 import S3Store
from shared.objects.store import (
    MissingObjectError,
    ObjectStore,
    StoreAwayError,
    StoreError,
    StoreFullError,
    identity,
    put,
)
from tests.shared.objects.small_s3 import small_s3

KEY = "acme/files/file-1.data"


@pytest.fixture(params=["directory", "bucket"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    if request.param == "directory":
        store: ObjectStore = DirectoryStore(tmp_path / "files")
        yield store
        await store.close()
        return
    pytest.importorskip("obstore")
    with small_s3() as url:
        for name, value in {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "r"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield S3Store("s3://bucket/some/prefix")


async def test_object_appears_whole_is_read_in_ranges_and_replaced(store: ObjectStore) -> None:
    data = os.urandom((9 << 20) + 5)
    writer = await store.writer(KEY)
    for start in range(0, len(data), 1 << 20):
        await writer.write(data[start : start + (1 << 20)])
    with pytest.raises(MissingObjectError):
        await store.read(KEY)
    await writer.commit()
    await writer.abort()
    assert await store.read(KEY) == data
    assert await store.read(KEY, 1 << 20, 7) == data[1 << 20 : (1 << 20) + 7]
    assert await store.read(KEY, len(data) - 2, 100) == data[-2:]
    assert await store.read(KEY, len(data), 100) == b""
    await put(store, KEY, b"small")
    assert await store.read(KEY) == b"small"
    await put(store, "acme/files/file-2.json", b"{}")
    await put(store, "acme/batches/b/part", b"p")
    assert [(each.name, each.num_bytes) for each in await store.objects("acme/files")] == [
        ("file-1.data", 5),
        ("file-2.json", 2),
    ]
    assert await store.folders() == ["acme"]
    assert await store.folders("acme/batches") == ["b"]
    await store.delete(KEY)
    await store.delete(KEY)
    assert [each.name for each in await store.objects("acme/files")] == ["file-2.json"]
    assert await store.objects("nobody/files") == []
    await store.delete_folder("acme/batches/b")
    await store.delete_folder("acme/batches/b")
    assert await store.objects("acme/batches/b") == []


async def test_what_is_aborted_never_appears(store: ObjectStore) -> None:
    writer = await store.writer(KEY)
    await writer.write(b"half")
    await writer.abort()
    assert await store.objects("acme/files") == []


async def test_store_keeps_the_identity_that_it_first_had(store: ObjectStore) -> None:
    name = await identity(store)
    assert len(name) == 32
    assert await identity(store) == name


async def test_store_that_was_used_keeps_its_identity_while_it_is_full(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await identity(store)

    async def create(self: ObjectStore, key: str, data: bytes) -> None:
        raise StoreFullError(f"{self.place} cannot be used: No space left on device")

    monkeypatch.setattr(type(store), "create", create)
    assert await identity(store) == name


async def test_files_are_the_owners_and_abandoned_ones_are_deleted_after_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await put(store, KEY, b"x")
    path = tmp_path / KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parents[:2]} == {0o700}
    for name, age_s in {".writing-old": 90_000, ".writing-new": 60}.items():
        path.with_name(name).write_bytes(b"y")
        os.utime(path.with_name(name), (time.time() - age_s,) * 2)
    assert [each.name for each in await store.objects("acme/files")] == ["file-1.data"]
    assert sorted(each.name for each in path.parent.iterdir()) == [".writing-new", "file-1.data"]


async def test_upload_of_a_moment_ago_is_not_abandoned_where_the_host_s_clock_is_days_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = DirectoryStore(tmp_path), time.time()
    await put(store, KEY, b"x")
    writing = (tmp_path / KEY).with_name(".writing-new")
    writing.write_bytes(b"y")
    monkeypatch.setattr(time, "time", lambda: now + 200_000)
    await store.objects("acme/files")
    assert writing.exists()
    assert len(list(writing.parent.iterdir())) == 2, "nothing else is left behind"


async def test_call_to_a_directory_that_hangs_fails_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "TIMEOUT_S", 0.1)
    is_back = threading.Event()
    store = DirectoryStore(tmp_path)
    with pytest.raises(StoreAwayError, match="does not answer"):
        await asyncio.wait_for(store.run(lambda: is_back.wait(20)), 10)
    is_back.set()
    await store.close()


async def test_leftover_that_cannot_be_deleted_hides_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    await put(store, KEY, b"x")
    leftover = (tmp_path / KEY).with_name(".writing-old")
    leftover.write_bytes(b"y")
    os.utime(leftover, (1.0, 1.0))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert [each.name for each in await store.objects("acme/files")] == ["file-1.data"]


async def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    writer = await store.writer(KEY)
    try:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    except FileNotFoundError:
        pytest.skip("needs /dev/full")
    os.dup2(descriptor, writer._file._descriptor)
    os.close(descriptor)
    with pytest.raises(StoreFullError, match="No space left"):
        await writer.write(b"x" * 100)
    await writer.abort()
    assert list((tmp_path / KEY).parent.iterdir()) == []
    with pytest.raises(StoreFullError, match="MB free"):
        await store.check_room(1 << 60)


async def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="Not a directory"):
        await identity(DirectoryStore(tmp_path / "file"))


async def test_bucket_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is not a bucket"):
        S3Store("s3:///prefix")


@pytest.mark.parametrize("key", ["../x/y", "a/../b", "a//b", "/a/b", "a/b/../../c", "a/.hidden", "a", "a/b\0", "a/b c"])
async def test_no_key_leads_out_of_the_store(tmp_path: Path, key: str) -> None:
    store = DirectoryStore(tmp_path / "files")
    with pytest.raises(AssertionError):
        await store.writer(key)
    with pytest.raises(AssertionError):
        await store.read(key)


async def test_put_that_fails_gives_up_what_it_began() -> None:
    writer = AsyncMock()
    writer.write.side_effect = StoreFullError
    with pytest.raises(StoreFullError):
        await put(AsyncMock(writer=AsyncMock(return_value=writer)), KEY, b"x")
    writer.abort.assert_awaited_once_with()
