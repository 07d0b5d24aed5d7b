"""A gateway that is killed: what its key's sequences held is free for other gateways soon afterwards."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.api.test_completions import is_known
from tests.gateway.gateway_process import running_gateway
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import WireWorker
from tests.servers import RedisServer


@pytest.mark.slow
async def test_slots_of_a_killed_gateway_are_back_within_five_seconds(
    nats_url: str, start_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    keys_file, model = tmp_path / "keys.json", f"m-{uuid.uuid4().hex[:8]}"
    _, key = create_key(keys_file, tenant="t", max_concurrent=1)
    settings = {"redis_url": start_redis().url, "keys_file": keys_file}
    body = {"model": model, "prompt": "x", "max_tokens": 100, "stream": True}
    with (
        running_gateway(tmp_path / "one", nats_url, **settings) as one,
        running_gateway(tmp_path / "other", nats_url, **settings) as other,
    ):
        async with WireWorker(nats_url, model, f"w-{model}") as worker:
            await is_known(one, model)
            await is_known(other, model)
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
