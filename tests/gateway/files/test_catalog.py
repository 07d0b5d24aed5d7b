"""Bounds of what one tenant's files cost others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.stored_reads import ReadSize
from gateway.errors import ApiError
from gateway.files.catalog import FileCatalog
from gateway.files.objects import FileRecord
from gateway.metrics import GatewayMetrics
from shared.objects.directory import DirectoryStore
from shared.objects.store import StoredObject, StoreError, StoreFullError


async def test_number_of_files_is_bounded_and_no_record_is_read_for_an_unknown_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.files.catalog.MAX_FILES", 3)
    store = DirectoryStore(tmp_path)
    catalog = FileCatalog(store, 1 << 20, GatewayMetrics())
    for number in range(3):
        async with catalog.room("acme", 1):
            await catalog.publish(
                FileRecord(
                    id=f"file-{number:032x}", tenant="acme", filename="x", purpose="batch", num_bytes=0, sha256="",
                    created_at=0,
                )
            )  # fmt: skip
    with pytest.raises(ApiError, match="has 3 files") as caught:
        await catalog.room("acme", 1).__aenter__()
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "file_quota_exceeded", "file")
    async with catalog.room("other", 1):
        pass
    read: list[str] = []
    size = ReadSize()

    async def counted(key: str, *place: Any) -> bytes:
        read.append(key)
        return await DirectoryStore.read(store, key, *place)

    monkeypatch.setattr(store, "read", counted)
    for purpose, num_files in (("fine-tune", 0), ("batch", 3)):
        found, _ = await catalog.page("acme", 10, None, size, is_ascending=True, purpose=purpose)
        assert (len(found), len(read), size.num_records) == (num_files, num_files, num_files)
    await store.close()


async def _bytes(num_bytes: int) -> AsyncIterator[bytes]:
    yield b"x" * num_bytes


async def test_uploads_at_several_gateways_do_not_exceed_the_quota_together(tmp_path: Path) -> None:
    stores = [DirectoryStore(tmp_path) for _ in range(2)]
    catalogs = [FileCatalog(store, 1000, GatewayMetrics()) for store in stores]
    one, two = (f"file-{number:032x}" for number in (1, 2))
    async with catalogs[0].room("acme", 600), catalogs[1].room("acme", 600):
        await catalogs[0].write("acme", one, _bytes(600))
        await catalogs[0].check_stored("acme", one)
        await catalogs[1].write("acme", two, _bytes(600))
        with pytest.raises(ApiError, match="They have 600, and this one has up to 600") as caught:
            await catalogs[1].check_stored("acme", two)
    assert caught.value.code == "file_quota_exceeded"
    stored = await stores[0].objects("acme/files")
    assert [(each.name, each.num_bytes) for each in stored if each.num_bytes] == [(f"{one}.data", 600)]
    for store in stores:
        await store.close()


async def test_an_upload_lists_its_tenants_files_once_while_the_one_before_is_recent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lists = DirectoryStore(tmp_path), list[str]()
    catalog = FileCatalog(store, 100, GatewayMetrics())

    async def counted(folder: str) -> list[StoredObject]:
        lists.append(folder)
        return await DirectoryStore.objects(store, folder)

    monkeypatch.setattr(store, "objects", counted)

    async def upload(number: int) -> int:
        lists.clear()
        async with catalog.room("acme", 40):
            await catalog.write("acme", f"file-{number:032x}", _bytes(40))
            await catalog.check_stored("acme", f"file-{number:032x}")
        return len(lists)

    assert [await upload(number) for number in range(2)] == [2, 1]
    with pytest.raises(ApiError, match="They have 80, and this one has up to 40"):
        await upload(2)
    # What has been deleted meanwhile makes room: a file that seems not to fit is looked at again.
    await catalog.delete("acme", f"file-{0:032x}")
    assert await upload(3) == 2
    monkeypatch.setattr("gateway.files.catalog._KNOWN_S", -1.0)
    await catalog.delete("acme", f"file-{1:032x}")
    assert await upload(4) == 2
    await store.close()


async def test_file_whose_time_is_over_is_not_found(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    catalog = FileCatalog(store, 1000, GatewayMetrics())
    for number, expires_at in enumerate((None, 1, 1 << 40)):
        await catalog.publish(
            FileRecord(
                id=f"file-{number:032x}", tenant="acme", filename="x", purpose="batch", num_bytes=7, sha256="",
                created_at=0, expires_at=expires_at,
            )
        )  # fmt: skip
    found = [await catalog.get("acme", f"file-{number:032x}") is not None for number in range(3)]
    assert found == [True, False, True]
    admitted: list[int] = []
    assert await catalog.read_whole("acme", f"file-{0:032x}", admitted.append) is None
    assert admitted == [7]
    await catalog.write_part("acme/files/file-" + 32 * "f" + ".json", b"{}")
    assert await catalog.get("acme", "file-" + 32 * "f") is None
    sweeping = asyncio.create_task(catalog.sweep_forever())
    async with asyncio.timeout(10):
        while await catalog.find("acme", f"file-{1:032x}") is not None:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.005)
    sweeping.cancel()
    await catalog.sweep()
    assert f"file-{32 * 'f'}.json" in {each.name for each in await store.objects("acme/files")}
    assert await catalog.get("acme", f"file-{2:032x}") is not None
    for error, status in ((StoreError("gone"), 503), (StoreFullError("full"), 507)):
        with pytest.raises(ApiError) as caught, catalog.answering():
            raise error
        assert caught.value.status == status
    await store.close()


async def test_a_tenant_lists_its_files_once_at_a_time_and_others_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    catalog = FileCatalog(store, 1 << 20, GatewayMetrics())
    listing, may_go_on = Counter[str](), asyncio.Event()

    async def slow(folder: str) -> list[StoredObject]:
        listing[folder] += 1
        await may_go_on.wait()
        return []

    monkeypatch.setattr(store, "objects", slow)

    async def upload(tenant: str) -> None:
        async with catalog.room(tenant, 1):
            pass

    page = catalog.page("acme", 10, None, ReadSize(), is_ascending=True, purpose=None)
    waiting = [asyncio.ensure_future(each) for each in (*(upload("acme") for _ in range(9)), upload("other"), page)]
    await asyncio.sleep(0.05)
    assert listing == {"acme/files": 1, "other/files": 1}
    may_go_on.set()
    await asyncio.gather(*waiting)
    assert listing["acme/files"] == 10
    await store.close()
