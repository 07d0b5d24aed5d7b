"""A gateway that is killed: what its key's sequences held is free for other gateways soon afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected
from tests.servers import RedisServer


@pytest.mark.slow
async def test_slots_of_a_killed_gateway_are_back_within_five_seconds(
    nats_url: str, start_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    keys_file = tmp_path / "keys.json"
    _, key = create_key(keys_file, tenant="t", max_concurrent=1)
    settings = {"redis_url": start_redis().url, "keys_file": keys_file}
    with (
        running_gateway(tmp_path / "one", nats_url, **settings) as one,
        running_gateway(tmp_path / "other", nats_url, **settings) as other,
    ):
        async with known_worker(nats_url, one, other) as worker:
            body = {"model": worker.model, "prompt": "x", "max_tokens": 100, "stream": True}
            async with connected(one, key=key) as client:
                client.post("/v1/completions", body)
                await worker.claim(await worker.next_request())
                # Longer than a lease: as long as its gateway lives, it is renewed.
                await asyncio.sleep(6)
                async with connected(other, key=key) as refused:
                    refused.post("/v1/completions", body)
                    status, answer = await refused.whole()
                    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
                one.process.kill()
                killed_at = time.monotonic()
                while worker.requests.empty():
                    assert time.monotonic() - killed_at < 6
                    async with connected(other, key=key) as asking:
                        asking.post("/v1/completions", body)
                        await asyncio.sleep(0.25)
                assert time.monotonic() - killed_at <= 5.5
