"""Files through OpenAI's own client and through bodies that no client library would send."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai.types.file_create_params import ExpiresAfter as FileExpiry

from gateway.admission.stored_reads import ReadSize
from gateway.batches import endpoint
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.files.catalog import FileCatalog
from gateway.files.endpoint import MAX_DOWNLOADS
from gateway.metrics import GatewayMetrics
from gateway.process.settings_check import check_settings
from ops.chaos.system import WallClock
from shared.errors import ConfigError
from shared.objects import open as open_module
from shared.objects.open import check_store, store_of
from tests.gateway.batches.conftest import Place
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.servers import NatsServer, free_port
from tests.shared.objects.small_s3 import small_s3
from tests.waiting import until

LINE = b'{"custom_id": "a"}\n'


@pytest.fixture
def headers(place: Place, tenant: str) -> dict[str, str]:
    """The key of this test's own tenant."""
    return place.headers(tenant)


def form(data: bytes = LINE, purpose: str | None = "batch", filename: str = 'filename="a.jsonl"', **more: str) -> bytes:
    fields = {**({} if purpose is None else {"purpose": purpose}), **more}
    parts = [f'--b\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    head = f'--b\r\nContent-Disposition: form-data; name="file"; {filename}\r\n\r\n'.encode()
    return b"".join([*parts, head, data, b"\r\n--b--\r\n"])


async def post(gateway: GatewayProcess, content: Any, headers: dict[str, str]) -> httpx2.Response:
    headers = {"content-type": "multipart/form-data; boundary=b", **headers}
    async with httpx2.AsyncClient(timeout=60) as raw:
        return await raw.post(f"{gateway.url}/v1/files", content=content, headers=headers)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
async def test_gateway_whose_clock_is_ahead_deletes_no_file_before_its_time(
    place: Place, client: openai.AsyncOpenAI, tenant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expiry = FileExpiry(anchor="created_at", seconds=3600)
    file = await client.files.create(file=("a.jsonl", LINE), purpose="batch", expires_after=expiry)
    clock = WallClock(tmp_path)
    clock.jump(4000)
    for name, value in clock.environ.items():
        monkeypatch.setenv(name, value)
    with place.gateway("ahead", is_patient=False) as ahead:
        async with place.client(ahead, tenant) as there:
            assert await there.files.retrieve(file.id) == file
            later = await there.files.create(file=("b.jsonl", LINE), purpose="batch", expires_after=expiry)
    assert later.created_at - file.created_at < 2000
    # Its first sweep is over.
    assert (await client.files.content(file.id)).content == LINE


async def test_file_is_uploaded_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(
        file=("dir/../ü in.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(LINE), "batch", "processed")
    assert file.filename == "ü in.jsonl"
    assert file.expires_at == file.created_at + 7200
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == LINE
    ids = [(await client.files.create(file=("b.jsonl", LINE), purpose="batch")).id for _ in range(4)]
    assert [each.id async for each in client.files.list(limit=2)][:5] == [*ids[::-1], file.id]
    assert (await client.files.list(limit=2, order="asc", after=file.id)).data[0].id == ids[0]
    assert {each.purpose for each in (await client.files.list(purpose="batch")).data} == {"batch"}
    assert all(each.purpose == "batch_output" for each in (await client.files.list(purpose="batch_output")).data)
    deleted = await client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    for call in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            await call


@pytest.mark.parametrize(
    ("content", "changed", "status", "code"),
    [
        (form(b""), {}, 400, "empty_file"),
        (form(b"\x1f\x8b\x08\0more"), {}, 400, "invalid_file_format"),
        (form(b"PK\x03\x04more"), {}, 400, "invalid_file_format"),
        (form(purpose="fine-tune"), {}, 400, "invalid_value"),
        (form(purpose=None), {}, 400, "missing_required_parameter"),
        (form(nonsense="x"), {}, 400, "unknown_parameter"),
        (form(**{"expires_after[seconds]": "9000"}), {}, 400, "invalid_value"),
        (form(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}), {}, 400, "invalid_value"),
        (form(purpose="x" * 20_000), {}, 400, "invalid_value"),
        (form()[:-12], {}, 400, "truncated_upload"),
        (b"", {}, 400, "truncated_upload"),
        (b"{}", {"content-type": "application/json"}, 400, "invalid_content_type"),
        (form(), {"content-encoding": "gzip"}, 415, "unsupported_content_encoding"),
        (form(), {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    ],
)
async def test_upload_that_is_no_file_of_a_batch_is_refused_with_its_reason(
    gateway: GatewayProcess,
    place: Place,
    tenant: str,
    headers: dict[str, str],
    content: bytes,
    changed: dict[str, str],
    status: int,
    code: str,
) -> None:
    answer = await post(gateway, content, headers | changed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert [each for each in place.files(tenant, "*") if each.is_file()] == []


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('filename="../../etc/passwd"', "passwd"),
        ('filename="C:\\\\x\\\\y.jsonl"', "y.jsonl"),
        ('filename=""', "upload"),
        ("x=y", "upload"),
        ('filename="a\tb"', "ab"),
    ],
)
async def test_name_of_a_file_leads_nowhere(
    gateway: GatewayProcess, headers: dict[str, str], sent: str, shown: str
) -> None:
    answer = await post(gateway, form(filename=sent), headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == shown


@pytest.mark.parametrize("file_id", ["..%2f..%2fkeys.json", "file-..", "file-" + "0" * 32, "file-%00", "*", "x" * 900])
async def test_unknown_file_is_not_found(gateway: GatewayProcess, headers: dict[str, str], file_id: str) -> None:
    async with httpx2.AsyncClient(headers=headers) as raw:
        for path in (file_id, f"{file_id}/content"):
            assert (await raw.get(f"{gateway.url}/v1/files/{path}")).status_code == 404


async def test_client_that_leaves_in_the_middle_leaves_nothing(
    gateway: GatewayProcess, place: Place, tenant: str, headers: dict[str, str]
) -> None:
    async def cut() -> AsyncIterator[bytes]:
        yield form(LINE * 100_000)[:1_500_000]
        await until(lambda: place.files(tenant, ".writing-*"))
        raise RuntimeError("the client leaves")

    logged = len(gateway.log)
    with pytest.raises(RuntimeError):
        await post(gateway, cut(), headers)
    await until(lambda: not place.files(tenant, ".writing-*"))
    assert "failed" not in gateway.log[logged:]


async def test_quota_and_size_are_told_with_their_limits(place: Place, tenant: str, headers: dict[str, str]) -> None:
    with place.gateway("small", max_file_bytes=100_000, files_tenant_bytes=1 << 20) as gateway:
        async with place.client(gateway, tenant) as client:
            with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes") as caught:
                await client.files.create(file=("a", b"x" * 200_000), purpose="batch")
            assert caught.value.status_code == 413

            async def chunked() -> AsyncIterator[bytes]:
                yield form(b"x" * 150_000)

            answer = await post(gateway, chunked(), headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
            files = [await client.files.create(file=("a", b"x" * 99_000), purpose="batch") for _ in range(10)]
            with pytest.raises(openai.BadRequestError, match="1048576 bytes together") as refused:
                await client.files.create(file=("a", b"x" * 99_000), purpose="batch")
            assert refused.value.code == "file_quota_exceeded"
            await client.files.delete(files[0].id)
            await client.files.create(file=("a", b"x" * 99_000), purpose="batch")


@pytest.mark.parametrize("num_mb", [24, pytest.param(200, marks=pytest.mark.slow)])
async def test_upload_and_download_take_constant_memory(place: Place, headers: dict[str, str], num_mb: int) -> None:
    piece, digest, size = b"x" * 1023 + b"\n", hashlib.sha256(), 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal peak
        head, end = form(b"SPLIT").split(b"SPLIT")
        yield head
        for number in range(num_mb << 6):
            yield piece * 16
            if number % 16 == 0:
                peak = max(peak, process.memory_info().rss)
        yield end

    with place.gateway("memory") as gateway:
        await post(gateway, form(), headers)
        process = psutil.Process(gateway.process.pid)
        before = peak = process.memory_info().rss
        answer = await post(gateway, body(), headers)
        assert (answer.status_code, answer.json()["bytes"]) == (200, num_mb << 20), answer.text
        async with httpx2.AsyncClient(headers=headers, timeout=60) as raw:
            url = f"{gateway.url}/v1/files/{answer.json()['id']}/content"
            async with raw.stream("GET", url) as download:
                async for data in download.aiter_bytes():
                    digest.update(data)
                    size += len(data)
                    peak = max(peak, process.memory_info().rss)
            await raw.delete(url.removesuffix("/content"))
    assert size == num_mb << 20
    assert digest.hexdigest() == hashlib.sha256(piece * (num_mb << 10)).hexdigest()
    assert peak - before < 16 << 20, f"{(peak - before) / (1 << 20):.1f} MB"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda path: path.write_bytes(LINE.replace(b"a", b"b")), "damaged_file"),
        (Path.unlink, "input_file_missing"),
    ],
)
async def test_file_that_was_changed_in_the_store_is_not_computed(
    client: openai.AsyncOpenAI, place: Place, tenant: str, change: Callable[[Path], object], code: str
) -> None:
    file = await client.files.create(file=("a.jsonl", LINE), purpose="batch")
    (path,) = place.files(tenant)
    change(path)
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    async with asyncio.timeout(30):
        while batch.status != "failed":
            batch = await client.batches.retrieve(batch.id)
            await asyncio.sleep(0.05)
    assert json.loads(batch.model_dump_json())["errors"]["data"][0]["code"] == code


async def test_gateway_without_a_store_says_so_and_serves_the_rest(place: Place, headers: dict[str, str]) -> None:
    with place.gateway("bare", files="") as gateway:
        async with httpx2.AsyncClient(headers=headers) as raw:
            answer = await raw.get(f"{gateway.url}/v1/batches")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "files_not_served")
            assert (await raw.get(f"{gateway.url}/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("asked", "status", "begin", "end"),
    [
        (None, 200, 0, 15),
        ("bytes=3-", 206, 3, 15),
        ("bytes=0-9", 206, 0, 10),
        ("bytes=5-99", 206, 5, 15),
        ("bytes=-10", 206, 5, 15),
        ("bytes=-99", 206, 0, 15),
        ("bytes=9-3", 200, 0, 15),
        ("bytes=-", 200, 0, 15),
        ("bytes=15-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
async def test_range_of_a_file_comes_with_its_length(
    gateway: GatewayProcess, headers: dict[str, str], asked: str | None, status: int, begin: int, end: int
) -> None:
    data = b"0123456789abcde"
    url = f"{gateway.url}/v1/files/{(await post(gateway, form(data), headers)).json()['id']}/content"
    asks = headers | ({} if asked is None else {"range": asked})
    async with httpx2.AsyncClient(headers=asks) as raw:
        answer = await raw.get(url)
        assert answer.status_code == status
        if status != 416:
            assert answer.content == data[begin:end]
            assert answer.headers["content-length"] == str(end - begin)
        told = {206: f"bytes {begin}-{end - 1}/15", 416: "bytes */15"}.get(status)
        assert answer.headers.get("content-range") == told
        head = await raw.head(url)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "15", b"")
        assert "content-range" not in head.headers


@pytest.mark.parametrize(
    ("path", "param"),
    [
        *((f"/v1/{path}", "after") for path in ("files?after=nope", "batches?after=nope", "batches?after=batch_1")),
        ("/v1/files?order=up", "order"),
    ],
)
async def test_page_that_cannot_be_is_refused(
    gateway: GatewayProcess, headers: dict[str, str], path: str, param: str
) -> None:
    async with httpx2.AsyncClient(headers=headers) as raw:
        answer = await raw.get(f"{gateway.url}{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_page_that_no_page_before_told_is_refused_in_anthropics_form_too(
    gateway: GatewayProcess, headers: dict[str, str]
) -> None:
    async with httpx2.AsyncClient(headers=headers | {"anthropic-version": "2023-06-01"}) as raw:
        answer = await raw.get(f"{gateway.url}/v1/files?page=page_nope")
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert "'page' must be as the page before told it" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("POST", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("POST", "/v1/streams/x", "DELETE, GET, HEAD"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ],
)
async def test_wrong_method_is_told_all_that_a_path_has(
    gateway: GatewayProcess, headers: dict[str, str], method: str, path: str, allowed: str
) -> None:
    async with httpx2.AsyncClient(headers=headers) as raw:
        answer = await raw.request(method, f"{gateway.url}{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert "Use " + " or ".join(allowed.replace(", HEAD", "").split(", ")) in answer.text


@pytest.mark.parametrize(
    ("files", "told"), [("/nope/x", "there is no /nope either"), ("ftp://x", "neither"), ("s3://", "is not a bucket")]
)
def test_store_that_cannot_be_is_refused_before_anything_starts(files: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_settings(GatewayConfig(files=files, auth=False, operator_port=None))
    assert not Path("/nope").exists()


async def test_gateway_serves_while_its_bucket_does_not_answer_and_has_files_once_it_does(
    start_nats: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    port = free_port()
    place = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "r"}
    for name, value in place.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with running_gateway(tmp_path, start_nats().url, is_patient=False, files="s3://bucket/files") as gateway:
        async with httpx2.AsyncClient(
            base_url=gateway.url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60
        ) as client:
            assert (await client.get("/v1/models")).status_code == 200
            assert (await client.get("/v1/files")).json()["error"]["code"] == "file_store_unavailable"
            with small_s3(port=port):
                stored = await client.post("/v1/files", files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"})
                assert stored.status_code == 200, stored.text
                listed = (await client.get("/v1/files")).json()["data"]
                assert [each["id"] for each in listed] == [stored.json()["id"]]
                batch = {"input_file_id": listed[0]["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                refused = (await client.post("/v1/batches", json=batch)).json()["error"]["code"]
                assert refused == "batch_unavailable", "only the queue is missing, which `headrace setup` makes"


@pytest.mark.parametrize("how", [errno.ESTALE, errno.EIO, "hangs"])
async def test_directory_that_does_not_answer_is_opened_once_it_does(
    how: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "OPEN_S", 0.1)
    directory, is_back = tmp_path / "mount" / "files", threading.Event()
    directory.mkdir(parents=True)
    stat, scandir, open_file = os.stat, os.scandir, Path.open

    def check(path: object) -> None:
        if is_back.is_set() or not str(path).startswith(str(directory.parent)):
            return
        if how == "hangs":
            is_back.wait(20)
        else:
            raise OSError(how, os.strerror(int(how)))

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *args, **kwargs: check(path) or call(path, *args, **kwargs)

    for owner, name, call in ((os, "scandir", scandir), (Path, "open", open_file)):
        monkeypatch.setattr(owner, name, checked(call))
    monkeypatch.setattr(os, "stat", checked(stat))
    monkeypatch.setattr(open_module, "_CHECK_S", 0.1)
    check_store(str(directory), "HEADRACE_FILES")
    store = store_of(str(directory), "HEADRACE_FILES")
    catalog = FileCatalog(store, 1 << 20, GatewayMetrics())
    await endpoint.open_directory(catalog)
    assert not catalog.identity
    if how != "hangs":
        with pytest.raises(ApiError) as caught:
            await catalog.page("acme", 10, None, ReadSize(), is_ascending=True, purpose=None)
        assert (caught.value.status, caught.value.code) == (503, "file_store_unavailable")
    is_back.set()
    await catalog.open()
    assert catalog.identity
    assert await catalog.page("acme", 10, None, ReadSize(), is_ascending=True, purpose=None) == ([], False)
    await store.close()


async def test_directory_that_may_not_be_used_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = store_of(str(tmp_path / "file"), "HEADRACE_FILES")
    with pytest.raises(ConfigError, match=r"HEADRACE_FILES.*cannot be used"):
        await endpoint.open_directory(FileCatalog(store, 1 << 20, GatewayMetrics()))
    await store.close()

    for missing in (tmp_path / "none" / "files", tmp_path / "file" / "files", tmp_path / "file" / "none" / "files"):
        with pytest.raises(ConfigError, match=rf"there is no {missing.parent} either"):
            check_store(str(missing), "HEADRACE_FILES")

    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(ConfigError, match=r"HEADRACE_FILES.*Permission denied"):
            check_store(str(tmp_path / "files"), "HEADRACE_FILES")


async def test_downloads_that_nobody_reads_are_bounded_by_tenant(
    gateway: GatewayProcess, headers: dict[str, str]
) -> None:
    file_id = (await post(gateway, form(b"x" * (8 << 20)), headers)).json()["id"]
    port = int(gateway.url.rpartition(":")[2])
    key = f"Authorization: {headers['authorization']}"
    ask = f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: a\r\n{key}\r\n\r\n".encode()
    sockets = []
    for _ in range(MAX_DOWNLOADS + 1):
        # The little that a reader without a limit buffers is read here; the rest stays with the gateway.
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(ask)
        sockets.append((writer, await reader.readline()))
    assert [line for _, line in sockets[:-1]] == [b"HTTP/1.1 200 OK\r\n"] * MAX_DOWNLOADS
    assert sockets[-1][1].startswith(b"HTTP/1.1 429 ")
    for writer, _ in sockets:
        writer.transport.abort()

    async with httpx2.AsyncClient(headers=headers) as raw:
        async with asyncio.timeout(30):
            while (await raw.get(f"{gateway.url}/v1/files/{file_id}/content")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_anthropics_libraries_upload_list_read_and_delete_in_their_own_form(
    gateway: GatewayProcess, headers: dict[str, str], client: openai.AsyncOpenAI
) -> None:
    headers = {**headers, "anthropic-version": "2023-06-01", "anthropic-beta": "files-api-2025-04-14"}
    query = {"beta": "true"}
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers, params=query, timeout=60) as raw:

        async def upload(name: str, **fields: str) -> dict[str, Any]:
            answer = await raw.post("/v1/files", files={"file": (name, b"pixels", "image/PNG")}, data=fields)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        async def listed(**more: Any) -> dict[str, Any]:
            return dict((await raw.get("/v1/files", params={**query, **more})).json())

        first, second, third = [await upload(name) for name in ("a.png", "b.png", "c.png")]
        created = first.pop("created_at"), first.pop("expires_at")
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment) for moment in created)
        about = {"type": "file", "filename": "a.png", "mime_type": "image/png", "size_bytes": 6, "downloadable": True}
        assert first == {"id": first["id"], **about}
        shown = (await raw.get(f"/v1/files/{first['id']}")).json()
        assert (shown["id"], shown["mime_type"]) == (first["id"], "image/png")
        page = await listed(limit=2)
        assert [each["id"] for each in page["data"]] == [third["id"], second["id"]]
        following = await listed(limit=2, page=page["next_page"])
        assert [each["id"] for each in following["data"]] == [first["id"]]
        assert (following["has_more"], following["next_page"]) == (False, None)
        assert (await listed(after_id=page["last_id"]))["first_id"] == first["id"]
        assert [each["id"] for each in (await listed(before_id=first["id"], limit=1))["data"]] == [second["id"]]
        named = await listed(**{"ids[]": [first["id"], "file-none"]})
        assert [each["id"] for each in named["data"]] == [first["id"]]
        assert (await raw.get(f"/v1/files/{first['id']}/content")).content == b"pixels"
        # The same file in OpenAI's form.
        assert (await client.files.retrieve(first["id"])).purpose == "user_data"
        deleted = (await raw.delete(f"/v1/files/{first['id']}")).json()
        assert deleted == {"id": first["id"], "type": "file_deleted"}
        gone = await raw.get(f"/v1/files/{first['id']}")
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found_error")
        short = await upload("d.png", expires_in_seconds="3600")
        life = datetime.fromisoformat(short["expires_at"]) - datetime.fromisoformat(short["created_at"])
        assert life.total_seconds() == 3600
        wrong = await raw.post("/v1/files", files={"file": ("a", b"x")}, data={"expires_in_seconds": "5"})
        assert "'expires_in_seconds' must be a whole number from 3600" in wrong.json()["error"]["message"]
        assert (await raw.get("/v1/files", params={"page": "page_x"})).status_code == 400
