"""Files of very many short lines: the event loop goes on, and reading ends once the verdict is certain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.api.large_bodies import LargeBodies
from gateway.batches.input_lines import CHUNK_BYTES, InputLine, input_lines
from gateway.batches.record import MAX_ERRORS_BYTES, BatchError, BatchRecord, bounded_errors
from gateway.batches.validation import InputCheck
from gateway.files.catalog import FileCatalog
from gateway.files.objects import FileRecord
from gateway.metrics import GatewayMetrics
from shared.objects.directory import DirectoryStore
from tests.gateway.fleet.test_hosted_models import new_fleet

RECORD = BatchRecord(
    id="batch_1", tenant="acme", endpoint="/v1/embeddings", input_file_id="file-1", completion_window="24h",
    created_at=0, expires_at=0,
)  # fmt: skip


async def written(catalog: FileCatalog, data: bytes) -> FileRecord:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    num_bytes, digest = await catalog.write("acme", "file-1", pieces())
    return FileRecord(
        id="file-1", tenant="acme", filename="x", purpose="batch", num_bytes=num_bytes, sha256=digest, created_at=0
    )


class CountedCatalog(FileCatalog):
    num_reads = 0

    async def read(self, record: FileRecord, start: int, num_bytes: int) -> bytes:
        self.num_reads += 1
        return await super().read(record, start, num_bytes)


@pytest.mark.parametrize("line", [b"\n", b"1\n", b"{}\n"])
async def test_event_loop_goes_on_every_thousand_lines(line: bytes) -> None:
    data = line * 60_000
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def read(start: int, num_bytes: int) -> bytes:
        return data[start : start + num_bytes]

    task = asyncio.create_task(turn())
    groups = [group async for group in input_lines(read, 1000)]
    task.cancel()
    assert num_turns >= 60
    numbers = [line.number for group in groups for line in group]
    assert numbers == ([] if line == b"\n" else list(range(1, len(numbers) + 1)))
    assert sum(map(len, groups)) == (0 if line == b"\n" else 60_000)


@pytest.mark.parametrize(("num_lines", "codes"), [(2, []), (3, ["too_many_lines"]), (9, ["too_many_lines"])])
def test_batch_has_at_most_so_many_lines(monkeypatch: pytest.MonkeyPatch, num_lines: int, codes: list[str]) -> None:
    monkeypatch.setattr("gateway.batches.validation.MAX_LINES", 2)
    check = InputCheck(RECORD, 1 << 20, new_fleet())
    body = {"custom_id": "", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    lines = [json.dumps(body | {"custom_id": str(number)}).encode() for number in range(num_lines)]
    check.check([InputLine(number, 0, len(line), line) for number, line in enumerate(lines, 1)])
    assert [(error.code, error.line) for error in check.errors] == [(code, 3) for code in codes]


@pytest.mark.parametrize(
    ("line", "code", "num_errors"),
    [
        (b"\n", "too_many_lines", 1),
        (b" \r\n" * 2, "too_many_lines", 1),
        (b'{"url": 1}' + b" " * 500 + b"\n", "invalid_url", 100),
    ],
)
async def test_reading_ends_once_the_file_is_refused(tmp_path: Path, line: bytes, code: str, num_errors: int) -> None:
    store, bodies = DirectoryStore(tmp_path), LargeBodies()
    catalog = CountedCatalog(store, 1 << 30, GatewayMetrics())
    data = line * (8 * CHUNK_BYTES // len(line))
    file = await written(catalog, data)
    check = InputCheck(RECORD, 1 << 20, new_fleet())
    await check.run(catalog, file, bodies)
    assert (check.errors[-1].code, len(check.errors)) == (code, num_errors)
    assert catalog.num_reads <= 2
    await store.close()


async def test_large_bodies_of_others_are_read_between_lines_that_are_checked(tmp_path: Path) -> None:
    store, bodies = DirectoryStore(tmp_path), LargeBodies()
    catalog = FileCatalog(store, 1 << 30, GatewayMetrics())
    data = b"{}\n" * 90
    file = await written(catalog, data)
    tasks: list[asyncio.Task[int]] = []
    loop = asyncio.get_running_loop()

    async def of_other() -> int:
        return await bodies.in_thread("other", lambda: check.num_lines)

    class Check(InputCheck):
        def check(self, group: list[InputLine]) -> None:
            loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(of_other())))
            super().check(group)

    check = Check(RECORD, 1 << 20, new_fleet())
    await check.run(catalog, file, bodies)
    assert check.num_lines == 90
    assert min(await asyncio.gather(*tasks)) < 45
    await store.close()


def test_errors_of_a_record_are_bounded_in_bytes() -> None:
    errors = [BatchError("c", "\N{GRINNING FACE}" * 1000, "\ud800" * 9000, line) for line in range(100)]
    kept = bounded_errors(errors)
    assert len(msgspec.json.encode(kept)) <= MAX_ERRORS_BYTES + len(kept) + 2
    assert [error.line for error in kept] == list(range(len(kept)))
    assert len(kept) > 10
    assert bounded_errors([BatchError("c", "short", None, 1)]) == [BatchError("c", "short", None, 1)]
