"""Calls between processes, over a real server."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from shared import calls
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from tests.servers import NatsServer
from tests.waiting import until

# More than a connection may have subscriptions.
NUM_CALLS = 1200


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[DirectClient, DirectClient]]:
    """Connect a caller and a callee."""
    caller, called = await connect(url, role="gateway", name="g"), await connect(url, role="worker", name="w")
    try:
        yield caller, called
    finally:
        await caller.close()
        await called.close()


async def heard_calls(called: DirectClient, subject: str) -> list[Msg]:
    """Return a list of the calls that come in."""
    heard: list[Msg] = []
    await called.subscribe_direct(subject, heard.append)
    await called.flush()
    return heard


async def test_more_calls_at_once_than_subscriptions_are_allowed(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("max_subscriptions: 1000\n")
    async with connected(start_nats("-c", str(config)).url) as (caller, called):
        heard = await heard_calls(called, "many")
        calling = asyncio.gather(*(call_process(caller, "many", b"%d" % n, 60) for n in range(NUM_CALLS)))
        await until(lambda: len(heard) == NUM_CALLS or caller.is_closed)
        for call in heard:
            await call.respond(b"answer to " + call.data)
        answers = await calling
        assert [answer.data for answer in answers] == [b"answer to %d" % n for n in range(NUM_CALLS)]
        assert caller.is_connected
        # The reply subject of one call does not reveal that of another.
        assert len({call.reply.rpartition(".")[0] for call in heard}) == 1
        assert all(len(call.reply.rpartition(".")[2]) == 32 for call in heard)


async def test_calls_that_end_without_an_answer_leave_nothing_behind(nats_url: str) -> None:
    async with connected(nats_url) as (caller, called):
        heard = await heard_calls(called, "silent")
        # The first call, on which the subscription of all depends, is cancelled before NATS has it.
        first = asyncio.create_task(call_process(caller, "silent", b"", 60))
        second = asyncio.create_task(call_process(caller, "silent", b"second", 60))
        await asyncio.sleep(0)
        first.cancel()
        await until(lambda: any(call.data == b"second" for call in heard))
        with pytest.raises(NatsTimeoutError):
            await call_process(caller, "silent", b"late", 0.05)
        with pytest.raises(NoRespondersError):
            await call_process(caller, "nobody", b"", 60)
        await until(lambda: {call.data for call in heard} >= {b"second", b"late"})
        (asked,) = [call for call in heard if call.data == b"second"]
        (late,) = [call for call in heard if call.data == b"late"]
        # One that comes too late, one to no call at all, one more than asked for: all are dropped.
        await late.respond(b"wrong")
        await called.publish(asked.reply.rpartition(".")[0] + "." + 32 * "0", b"wrong")
        await asked.respond(b"right")
        await asked.respond(b"wrong")
        assert (await second).data == b"right"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (len(caller._subs), calls._answers[caller]._waiting) == (1, {})


async def test_calls_go_on_after_a_reconnect(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    async with connected(server.url) as (caller, called):

        async def answer(message: Msg) -> None:
            await message.respond(b"answer")

        await called.subscribe("a", cb=answer)
        await called.flush()
        assert (await call_process(caller, "a", b"", 60)).data == b"answer"
        server.restart()
        for client in (caller, called):
            await until(lambda client=client: client.is_connected and client.stats["reconnects"])
        await called.flush()
        assert (await call_process(caller, "a", b"", 60)).data == b"answer"
        assert len(caller._subs) == 1


async def test_what_is_known_of_calls_ends_with_the_connection(nats_url: str) -> None:
    async with connected(nats_url) as (caller, called):
        with pytest.raises(NoRespondersError):
            await call_process(caller, "nobody", b"", 60)
        known = weakref.ref(calls._answers[caller])
    del caller, called
    await until(lambda: gc.collect() >= 0 and known() is None)
