"""Requests to the log while the connection to NATS is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.errors import ConnectionReconnectingError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from gateway.resumable import store as store_module
from gateway.resumable.log import StreamLog
from gateway.resumable.store import MessageStore
from shared.direct_client import DirectClient
from shared.nats_connection import connect
from shared.subjects import stream_subject
from tests.gateway.resumable.test_writer import Case
from tests.servers import NatsServer
from tests.waiting import until

SUBJECT = stream_subject("t", "s", "head")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def nats(server: NatsServer) -> AsyncIterator[DirectClient]:
    nats = await connect(server.url, role="gateway", name="store")
    await StreamLog(nats).ensure()
    yield nats
    await nats.close()


async def test_requests_under_way_fail_as_soon_as_the_connection_is_lost(
    server: NatsServer, nats: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_TIMEOUT_S", 60.0)
    store = MessageStore(nats)
    await store.start()
    # NATS takes the requests and is restarted before it answers.
    server.pause()
    requests = [asyncio.ensure_future(each) for each in (store.write(SUBJECT, b"lost", 0), store.last(SUBJECT))]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    server.kill()
    for request in requests:
        with pytest.raises(ConnectionReconnectingError):
            await asyncio.wait_for(request, 10)
    assert time.monotonic() - began < 10
    server.restart()
    await until(lambda: nats.is_connected)
    await StreamLog(nats).ensure()
    seq = await store.write(SUBJECT, b"written", 0)
    found = await store.last(SUBJECT)
    assert found is not None
    assert (found.seq, found.data) == (seq, b"written")
    # Another error than that of the number: the caller must not take it for a writer that was faster.
    assert await store.write(SUBJECT, b"late", 0) is None
    with pytest.raises(APIError):
        await store.write(SUBJECT, b"astray", seq or 0, "Nats-Expected-Stream: ANOTHER\r\n")
    await store.close()
    assert not nats.lost_callbacks


async def test_requests_that_nats_does_not_answer_fail_each_in_its_time(
    server: NatsServer, nats: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_TIMEOUT_S", 0.5)
    store = MessageStore(nats)
    await store.start()
    server.pause()
    began = time.monotonic()
    first = asyncio.ensure_future(store.last(SUBJECT))
    await asyncio.sleep(0.25)
    second = asyncio.ensure_future(store.last(SUBJECT))
    for request, after_s in ((first, 0.4), (second, 0.65)):
        with pytest.raises(NatsTimeoutError):
            await asyncio.wait_for(request, 10)
        assert time.monotonic() - began > after_s
    assert not store._answers
    server.resume()
    assert await store.last(SUBJECT) is None
    await store.close()


async def test_round_that_a_restart_of_nats_interrupts_is_repeated_when_nats_is_back(
    server: NatsServer, nats: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_TIMEOUT_S", 60.0)
    case, log = Case(), StreamLog(nats)
    case.writer._log = log
    await log.start()
    case.say("a")
    await until(lambda: case.shown == "a")
    server.pause()
    case.say("b")
    await asyncio.sleep(0.1)
    server.kill()
    server.restart()
    await until(lambda: case.shown == "ab", timeout_s=20)
    await case.writer.close()
    await log.close()
