"""Reads of what is stored, on behalf of the routes of files."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_RECORDS
from gateway.admission.stored_reads import CONCURRENT_READERS, ReadSize, StoredReads
from gateway.files.catalog import Hooks
from gateway.files.endpoint import FileRoutes
from gateway.files.objects import FileRecord

FILE = FileRecord(
    id=f"file-{'0' * 32}", tenant="t", filename="a", purpose="batch", num_bytes=1, sha256="", created_at=0
)


async def test_deletions_look_for_batches_in_turns_of_their_tenant_and_pay_for_the_records() -> None:
    num_running = num_most = 0

    async def user_of(tenant: str, file_id: str, size: ReadSize) -> None:
        nonlocal num_running, num_most
        num_running += 1
        num_most = max(num_most, num_running)
        await asyncio.sleep(0.01)
        size.num_records += READ_RECORDS
        num_running -= 1

    lease = Mock()
    limiter: Any = Mock(admit_read=AsyncMock(return_value=lease))
    services: Any = Mock(reads=StoredReads(limiter))
    catalog: Any = Mock(hooks=Hooks(AsyncMock(), user_of), get=AsyncMock(return_value=FILE), delete=AsyncMock())
    routes, request = FileRoutes(services, catalog), Mock(path_params={"file_id": FILE.id}, headers={})
    num_deletions = 3 * CONCURRENT_READERS
    await asyncio.gather(*(routes._delete(request, Principal("key", "t")) for _ in range(num_deletions)))
    assert catalog.delete.await_count == num_deletions
    assert num_most == CONCURRENT_READERS
    assert [call.args for call in lease.release.call_args_list] == [(2,)] * num_deletions
    # Whoever reads a file pays for its record too.
    assert (await routes._found(request, Principal("key", "t"))).record == FILE
    assert [call.args for call in lease.release.call_args_list[num_deletions:]] == [(1,)]
