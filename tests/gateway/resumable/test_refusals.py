"""Resumable streams that the queue does not take: refused with a status, or kept until it takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM
from tests.gateway.gateway_process import API_KEY, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.resumable.stream_reader import Client
from tests.servers import NatsServer


async def test_a_stream_that_cannot_be_queued_is_refused_with_a_status(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = start_nats()
    with running_gateway(tmp_path, server.url) as gateway:
        nats, client = await connect(server.url, role="admin", name="test"), Client(gateway.url, API_KEY)
        async with known_worker(server.url, gateway) as worker:
            # The queue is lost, and the log of streams is not: as when one of them is restored before the other.
            await nats.jetstream().delete_stream(INTERACTIVE_STREAM)
            body = {"model": worker.model, "prompt": "x", "max_tokens": 5, "stream": True}
            body["stream_options"] = {"resumable": True}
            async with client.post("/v1/completions", body, **{"x-request-id": "lost"}) as reading:
                told = (await reading.response.aread()).decode()
                assert (reading.response.status_code, "queue_unavailable" in told) == (503, True), told
            assert (await client.ask("GET", "/v1/streams"))[1]["data"] == []
            assert (await client.ask("GET", "/v1/streams/lost"))[0] == 404
        await nats.close()
