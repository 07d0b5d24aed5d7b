"""One key's requests that never arrive, or never end, and a client of another key that is served throughout."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.wire_worker import WireWorker

MAX_CONNECTIONS = 24
MAX_STREAMS = 8
MAX_CONCURRENT = 3
MAX_BODY_BYTES = 1 << 20
VICTIM = API_KEY


@dataclass
class Attacked:
    """A gateway, a worker behind it, and the keys of those who attack it."""

    gateway: GatewayProcess
    limited: str
    unlimited: str
    worker: WireWorker

    async def serve_victim(self, prompt: str = "a") -> None:
        """Ask as the victim, on a connection of its own, and see that it is answered."""
        async with connected(self.gateway, key=VICTIM) as client:
            client.post("/v1/completions", {"model": self.worker.model, "prompt": prompt, "max_tokens": 1})
            await self.worker.end(await self.worker.next_request(), 0)
            assert (await client.whole())[0] == 200


@pytest.fixture(scope="module")
def keyed(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, str, str]]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    keys = directory / "keys.json"
    _, limited = create_key(keys, tenant="limited", max_concurrent=MAX_CONCURRENT)
    _, unlimited = create_key(keys, tenant="unlimited")
    settings = {
        "keys_file": keys,
        "max_connections": MAX_CONNECTIONS,
        "max_streams": MAX_STREAMS,
        "max_body_bytes": MAX_BODY_BYTES,
        "max_body_bytes_in_flight": 4 * MAX_BODY_BYTES,
    }
    with running_gateway(directory, nats_url, **settings) as gateway:
        yield gateway, limited, unlimited


@pytest.fixture
async def attacked(keyed: tuple[GatewayProcess, str, str], nats_url: str) -> AsyncIterator[Attacked]:
    gateway, limited, unlimited = keyed
    async with known_worker(nats_url, gateway) as worker:
        yield Attacked(gateway, limited, unlimited, worker)


def begin_body(client: RawClient, length: int, sent: bytes = b"{", path: str = "/v1/completions") -> None:
    """Announce a body and send only its beginning."""
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {client.key}\r\nContent-Length: {length}\r\n\r\n"
    client.writer.write(head.encode() + sent)


async def test_slow_bodies_of_a_limited_key_are_as_many_as_it_may_run(attacked: Attacked) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(3 * MAX_CONNECTIONS):
            slow = await stack.enter_async_context(connected(attacked.gateway, key=attacked.limited))
            begin_body(slow, 1000)
            if number >= MAX_CONCURRENT:
                status, answer = await slow.whole()
                assert (status, answer["error"]["code"]) == (429, "too_many_bodies")
                assert f"may run {MAX_CONCURRENT} sequences" in answer["error"]["message"]
            await attacked.serve_victim()


async def test_slow_bodies_of_an_unlimited_key_neither_deny_nor_cut_off_another(attacked: Attacked) -> None:
    body = b'{"model": "%b", "prompt": "late", "max_tokens": 1}' % attacked.worker.model.encode()
    async with contextlib.AsyncExitStack() as stack:
        uploading = await stack.enter_async_context(connected(attacked.gateway, key=VICTIM))
        begin_body(uploading, len(body), body[:10])
        for _ in range(3 * MAX_CONNECTIONS):
            slow = await stack.enter_async_context(connected(attacked.gateway, key=attacked.unlimited))
            begin_body(slow, 1000)
            await attacked.serve_victim()
        uploading.writer.write(body[10:])
        await attacked.worker.end(await attacked.worker.next_request(), 0)
        assert (await uploading.whole())[0] == 200


async def test_large_bodies_of_one_key_leave_bytes_for_another(attacked: Attacked) -> None:
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(20):
        answers = []
        for _ in range(8):
            slow = await stack.enter_async_context(connected(attacked.gateway, key=attacked.unlimited))
            begin_body(slow, MAX_BODY_BYTES, b" " * (MAX_BODY_BYTES - 100))
            answers.append(asyncio.create_task(slow.whole()))
            await attacked.serve_victim("x" * (MAX_BODY_BYTES // 2))
        # Two fit; which two depends on whose bytes arrive first.
        for refused in itertools.islice(asyncio.as_completed(answers), 6):
            status, answer = await refused
            assert (status, answer["error"]["code"]) == (429, "too_many_body_bytes")
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_slow_bodies_of_the_tokenizer_route_count_as_well(attacked: Attacked) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(MAX_CONCURRENT + 1):
            slow = await stack.enter_async_context(connected(attacked.gateway, key=attacked.limited))
            begin_body(slow, 1000, path="/tokenize" if number < MAX_CONCURRENT else "/v1/completions")
            await attacked.serve_victim()
        status, answer = await slow.whole()
        assert (status, answer["error"]["code"]) == (429, "too_many_bodies")


async def test_streams_of_one_key_leave_a_place_for_another(attacked: Attacked) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_STREAMS - 1):
            stream = await stack.enter_async_context(connected(attacked.gateway, key=attacked.unlimited))
            stream.post("/v1/completions", {"model": attacked.worker.model, "prompt": "a", "stream": True})
            await attacked.worker.next_request()
        more = await stack.enter_async_context(connected(attacked.gateway, key=attacked.unlimited))
        more.post("/v1/completions", {"model": attacked.worker.model, "prompt": "a", "stream": True})
        status, answer = await more.whole()
        assert (status, answer["error"]["code"]) == (429, "too_many_streams")
        await attacked.serve_victim()


async def test_key_whose_slow_bodies_ended_is_served_again(attacked: Attacked) -> None:
    for _ in range(2):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_CONCURRENT):
                slow = await stack.enter_async_context(connected(attacked.gateway, key=attacked.limited))
                begin_body(slow, 1000)
            await attacked.serve_victim()
    async with connected(attacked.gateway, key=attacked.limited) as client:
        client.post("/v1/completions", {"model": attacked.worker.model, "prompt": "a", "max_tokens": 1})
        await attacked.worker.end(await attacked.worker.next_request(), 0)
        assert (await client.whole())[0] == 200
