from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from shared.nats_connection import connect
from shared.server_clock import ServerClock, ask_skew, skew_s, told_skew
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


async def test_clock_of_the_server_stands_for_one_that_is_wrong_and_is_set_meanwhile(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(nats_url, role="worker", name="w")
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    true_time = time.time
    for wrong_by_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda off=wrong_by_s: true_time() + off)
        clock = ServerClock()
        assert abs(clock.now() - true_time()) > 3000
        await clock.synchronize(client)
        assert abs(clock.now() - true_time()) < 1
        # As when the clock of the machine is set while the process runs.
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert abs(clock.now() - true_time()) < 1
    await client.close()
    # Without an answer it goes on as it was.
    await clock.synchronize(client)
    assert abs(clock.now() - true_time()) < 1


class LateClient:
    """A connection whose answers come late, and of which the first `num_lost` do not come."""

    def __init__(self, client: Client, late_s: float, num_lost: int = 0) -> None:
        self.client, self.late_s, self.num_lost = client, late_s, num_lost

    async def request(self, *asked: Any, **options: Any) -> Any:
        if self.num_lost:
            self.num_lost -= 1
            raise NatsTimeoutError
        answer = await self.client.request(*asked, **options)
        await asyncio.sleep(self.late_s)
        return answer


async def test_a_wrong_clock_goes_by_a_late_answer_until_there_is_a_better_one(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(nats_url, role="worker", name="w")
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    true_time, late = time.time, LateClient(client, 0.8)
    monkeypatch.setattr(time, "time", lambda: true_time() + 3600)
    clock = ServerClock()
    await clock.synchronize(late)  # type: ignore[arg-type]
    # Half of the time that the question took.
    assert 0.3 < abs(clock.now() - true_time()) < 2
    await clock.synchronize(client)
    error = abs(clock.now() - true_time())
    assert error < 1
    await clock.synchronize(late)  # type: ignore[arg-type]
    assert abs(clock.now() - true_time()) == pytest.approx(error, abs=0.02)
    await client.close()


async def test_a_clock_that_has_had_no_answer_asks_again(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await connect(nats_url, role="worker", name="w")
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 3600)
    clock = ServerClock()
    await clock.synchronize(LateClient(client, 0.0, num_lost=2))  # type: ignore[arg-type]
    assert abs(clock.now() - true_time()) < 1
    await client.close()
