"""A tenant's oldest messages are dropped beyond its bound, of streams with room only once they are half full."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nats.js.api import StreamConfig

from shared.nats_connection import connect
from shared.tenant_bounds import TenantBound
from tests.servers import NatsServer


@pytest.mark.parametrize(
    ("when_half_full", "size", "num_kept"),
    [(False, 10, 4), (True, 10, 8), (True, 9_000, 4)],
    ids=["bounded", "room", "half full"],
)
async def test_oldest_messages_of_a_tenant_are_dropped_beyond_its_bound(
    start_nats: Callable[..., NatsServer], when_half_full: bool, size: int, num_kept: int
) -> None:
    client = await connect(start_nats().url, role="admin", name="test")
    js = client.jetstream()
    await js.add_stream(StreamConfig("S", subjects=["s.*.*"], max_bytes=100_000))
    bound = TenantBound(js, "S", lambda tenant: f"s.{tenant}.*", 4, 8, when_half_full=when_half_full)
    await js.publish("s.other.0", b"")
    for number in range(8):
        await js.publish(f"s.t.{number}", bytes(size))
        bound.count("t", 1)
    await bound.close()
    kept = (await js.stream_info("S", subjects_filter="s.>")).state.subjects or {}
    assert kept.keys() == {"s.other.0", *(f"s.t.{number}" for number in range(8 - num_kept, 8))}
    await client.close()
