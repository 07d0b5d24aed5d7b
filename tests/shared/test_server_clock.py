from __future__ import annotations

from shared.nats_connection import connect
from shared.server_clock import ask_skew, skew_s, told_skew
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_interactive_stream


def test_difference_of_clocks_is_told_with_its_sign() -> None:
    skew = skew_s("2026-01-02T03:04:05.123456789Z", 1767323045.623456789)
    assert skew is not None
    assert told_skew(skew) == "0.500 s ahead of NATS"
    assert told_skew(-3600.0) == "3600.000 s behind NATS"
    assert skew_s("", 0.0) is None


async def test_server_tells_its_time_with_a_stream(nats_url: str) -> None:
    client = await connect(nats_url, role="worker", name="w")
    assert await ask_skew(client, "NO_SUCH_STREAM") is None
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    skew = await ask_skew(client, INTERACTIVE_STREAM)
    await client.close()
    # The same clock: half of the time that the question took, however busy this machine is.
    assert skew is not None
    assert abs(skew) < 2
