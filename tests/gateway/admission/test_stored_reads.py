from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.admission.auth import Principal
from gateway.admission.limits import READ_BYTES, READ_RECORDS, RateLimiter
from gateway.admission.stored_reads import CONCURRENT_READERS, CONCURRENT_RESUMPTIONS, ReadSize, StoredReads, StoreKind
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics


@pytest.mark.parametrize(
    ("size", "num_reads"),
    [
        (ReadSize(), 1),
        (ReadSize(num_bytes=READ_BYTES), 1),
        (ReadSize(num_bytes=READ_BYTES + 1), 2),
        (ReadSize(num_records=READ_RECORDS - 1), 1),
        (ReadSize(num_records=10_000), 626),
        (ReadSize(num_names=20_000), 20),
        (ReadSize(num_bytes=16 << 20, num_records=16), 256),
    ],
)
def test_size_counts_by_its_bytes_or_records(size: ReadSize, num_reads: int) -> None:
    assert size.num_reads == num_reads


async def test_tenant_has_a_few_turns_at_each_kind_of_store_and_others_have_theirs() -> None:
    reads, running, may_go_on = StoredReads(), Counter[tuple[str, StoreKind]](), asyncio.Event()

    async def read(tenant: str, kind: StoreKind, key: str = "key") -> None:
        async with reads.turn(Principal(key, tenant), kind):
            running[tenant, kind] += 1
            await may_go_on.wait()

    # More keys do not give a tenant more turns.
    waiting = [asyncio.ensure_future(read("greedy", "files", f"key-{number}")) for number in range(60)]
    waiting += [asyncio.ensure_future(read("other", "files")), asyncio.ensure_future(read("greedy", "responses"))]
    waiting += [asyncio.ensure_future(read("greedy", "resumptions")) for _ in range(100)]
    await asyncio.sleep(0)
    assert running == {
        ("greedy", "files"): CONCURRENT_READERS,
        ("other", "files"): 1,
        ("greedy", "responses"): 1,
        ("greedy", "resumptions"): CONCURRENT_RESUMPTIONS,
    }
    may_go_on.set()
    await asyncio.gather(*waiting)
    assert running["greedy", "files"] == 60


async def test_what_was_read_counts_also_where_reading_fails() -> None:
    reads, principal = StoredReads(RateLimiter(None, GatewayMetrics())), Principal("key", "t", reads_per_minute=5)

    async def break_off() -> None:
        async with reads.turn(principal, "files") as size:
            size.num_records = 5 * READ_RECORDS
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await break_off()
    with pytest.raises(ApiError, match="5 reads of stored data per minute"):
        async with reads.turn(principal, "files"):
            pytest.fail("this read is too many")
