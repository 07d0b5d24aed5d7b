"""Kilobytes of gzip that become megabytes, from many connections of one tenant, and a client of another tenant."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import WireWorker

MAX_BODY_BYTES = 8 << 20
NUM_CONNECTIONS = 300
# A victim waits for the one bomb that is being inflated, some 60 ms. It waited for all that were there before it.
MAX_WAIT_S = 4.0
BOMB = gzip.compress(b'{"model": "nobody", "prompt": "' + b"a" * (MAX_BODY_BYTES - 100) + b'"}')


@dataclass
class Keyed:
    """A gateway, and the keys of those who attack it."""

    gateway: GatewayProcess
    limited: str
    unlimited: str


@pytest.fixture(scope="module")
def keyed(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory: Path = tmp_path_factory.mktemp("gateway")
    keys = directory / "keys.json"
    _, limited = create_key(keys, tenant="limited", requests_per_minute=30)
    _, unlimited = create_key(keys, tenant="unlimited")
    with running_gateway(directory, nats_url, keys_file=keys, max_body_bytes=MAX_BODY_BYTES) as gateway:
        yield Keyed(gateway, limited, unlimited)


class Attack:
    """Sends bombs on many connections.

    Attributes:
        answers: Their codes.
    """

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self._gateway = gateway
        self._key = key
        self.answers: Counter[str] = Counter()

    async def send_forever(self) -> None:
        async with connected(self._gateway, key=self._key) as client:
            while True:
                client.post_bytes("/v1/completions", BOMB, "Content-Encoding: gzip")
                _, answer = await client.whole()
                code = answer["error"]["code"]
                self.answers[code] += 1
                if code == "too_many_body_bytes":
                    await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def attack(gateway: GatewayProcess, key: str) -> AsyncIterator[Attack]:
    running = Attack(gateway, key)
    tasks = [asyncio.create_task(running.send_forever()) for _ in range(NUM_CONNECTIONS)]
    try:
        while running.answers.total() < NUM_CONNECTIONS // 10:
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in tasks)
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answered(gateway: GatewayProcess, worker: WireWorker, *, length: int, is_compressed: bool) -> None:
    """Ask as the victim, on a connection of its own, and see that it is answered."""
    body = json.dumps({"model": worker.model, "prompt": "x" * length, "max_tokens": 1}).encode()
    headers = ["Content-Encoding: gzip"] if is_compressed else []
    async with connected(gateway, key=API_KEY) as client:
        client.post_bytes("/v1/completions", gzip.compress(body) if is_compressed else body, *headers)
        await worker.end(await worker.next_request(), 0)
        assert (await client.whole())[0] == 200


@pytest.mark.parametrize("has_limits", [True, False])
async def test_bombs_of_another_tenant_delay_no_body(keyed: Keyed, nats_url: str, has_limits: bool) -> None:
    key = keyed.limited if has_limits else keyed.unlimited
    async with known_worker(nats_url, keyed.gateway) as worker, attack(keyed.gateway, key) as bombs:
        for length, is_compressed in [(2, True), (80_000, False), (80_000, True)]:
            waited_s = []
            for _ in range(5):
                began_at = time.monotonic()
                await answered(keyed.gateway, worker, length=length, is_compressed=is_compressed)
                waited_s.append(time.monotonic() - began_at)
                await asyncio.sleep(0.1)
            assert statistics.median(waited_s) < MAX_WAIT_S, (length, is_compressed, waited_s)
        assert bombs.answers["too_many_body_bytes"] > bombs.answers.total() / 2
