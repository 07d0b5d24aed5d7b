"""A stream whose gateway dies, alone or with the worker, or only seemed to be dead; NATS that loses its memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from shared.nats_connection import connect
from shared.streams import STREAMS_STREAM
from tests.gateway.gateway_process import API_KEY, GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.resumable.stream_reader import Client, Reading
from tests.gateway.wire_worker import WireWorker, expected_text
from tests.servers import NatsServer

NUM_TOKENS = 300
# These gateways wait for 20 s for a worker or a claim: whoever reads on elsewhere waits for none of them.
MAX_TAKEOVER_S = 10.0


class Pair:
    """Two gateways of the test's own, with a worker that they know."""

    def __init__(self, gateways: list[GatewayProcess], worker: WireWorker) -> None:
        self.gateways = gateways
        self.worker = worker
        self.one, self.two = (Client(gateway.url, API_KEY) for gateway in gateways)

    def body(self, max_tokens: int = NUM_TOKENS, **more: Any) -> dict[str, Any]:
        options = {"resumable": True, "include_usage": True}
        body = {"model": self.worker.model, "prompt": "x", "max_tokens": max_tokens, "stream": True}
        return body | {"stream_options": options} | more


@pytest.fixture
async def pair(nats: NatsServer, tmp_path: Path) -> AsyncIterator[Pair]:
    with running_gateway(tmp_path / "one", nats.url) as one, running_gateway(tmp_path / "two", nats.url) as two:
        async with known_worker(nats.url, one, two) as worker:
            serving = asyncio.create_task(worker.serve(0.005))
            yield Pair([one, two], worker)
            serving.cancel()


@pytest.fixture
def nats(start_nats: Callable[..., NatsServer]) -> NatsServer:
    return start_nats()


async def rest_of(client: Client, reading: Reading) -> tuple[Reading, float]:
    """Return the rest of a stream, read elsewhere, and after how long its first event was there."""
    began = time.monotonic()
    async with client.resumed(reading.stream_id, Last_Event_ID=str(max(reading.events))) as rest:
        assert rest.response.status_code == 200
        await rest.read(1)
        took_s = time.monotonic() - began
        await rest.read()
    return rest, took_s


async def read_until_cut(reading: Reading) -> None:
    with contextlib.suppress(Exception):
        await reading.read()


def check(reading: Reading, rest: Reading, text: str) -> None:
    assert min(rest.events) == max(reading.events) + 1
    assert reading.text + rest.text == text
    assert rest.events[max(rest.events)].endswith(b"data: [DONE]")


@contextlib.asynccontextmanager
async def messages_read(nats: NatsServer) -> AsyncIterator[Counter[str]]:
    """Count the messages of streams that gateways read: of heads, requests and pieces."""
    count: Counter[str] = Counter()
    client = await connect(nats.url, role="gateway", name="observer")

    def note(message: Msg) -> None:
        subject = json.loads(message.data)["last_by_subj"].split(".")
        if subject[1] == "stream" and subject[2] != "_j":
            # A piece is named by its owner and its number.
            count[subject[4] if subject[4] in ("head", "req") else "piece"] += 1

    await client.subscribe_direct(f"$JS.API.STREAM.MSG.GET.{STREAMS_STREAM}", note)
    await client.flush()
    yield count
    await client.flush()
    await client.close()


async def test_a_stream_goes_on_when_its_gateway_is_killed(pair: Pair, nats: NatsServer) -> None:
    async with pair.one.post("/v1/completions", pair.body()) as reading:
        await reading.read(20)
        pair.gateways[0].process.kill()
        await read_until_cut(reading)
    async with messages_read(nats) as count:
        rest, took_s = await rest_of(pair.two, reading)
    # Hundreds of streams are taken over at once, and each reading is a round trip of them all.
    assert (count["head"], count["req"]) == (1, 1)
    assert count["piece"] <= 2
    check(reading, rest, expected_text(NUM_TOKENS))
    assert took_s < MAX_TAKEOVER_S
    assert rest.objects[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    # What was put together at the second gateway is told again as what the client has seen of both.
    async with pair.two.resumed(reading.stream_id) as again:
        await again.read()
    assert again.events == reading.events | rest.events


@pytest.mark.slow
async def test_a_stream_goes_on_although_nobody_asks_for_it(pair: Pair) -> None:
    async with pair.one.post("/v1/completions", pair.body()) as reading:
        await reading.read(20)
        pair.gateways[0].process.kill()
        await read_until_cut(reading)
    async with asyncio.timeout(60):
        # The list reads what is kept, and asks for no stream.
        while (await pair.two.ask("GET", "/v1/streams"))[1]["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    rest, _ = await rest_of(pair.two, reading)
    check(reading, rest, expected_text(NUM_TOKENS))


async def test_a_stream_goes_on_when_its_gateway_and_its_worker_die(pair: Pair, nats: NatsServer) -> None:
    model = pair.worker.model
    async with pair.one.post("/v1/completions", pair.body(n=2)) as reading:
        await reading.read(20)
        async with WireWorker(nats.url, model, "second") as second:
            await asyncio.sleep(0.3)
            pair.gateways[0].process.kill()
            await pair.worker.die()
            await read_until_cut(reading)
            serving = asyncio.create_task(second.serve(0.005))
            rest, took_s = await rest_of(pair.two, reading)
            serving.cancel()
    assert took_s < MAX_TAKEOVER_S
    texts = ["", ""]
    for each in [*reading.objects, *rest.objects]:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected_text(NUM_TOKENS)] * 2


async def test_a_stream_that_is_followed_goes_on_when_its_gateway_is_killed(pair: Pair) -> None:
    async with (
        pair.one.post("/v1/completions", pair.body()) as reading,
        pair.two.resumed((await reading.read(5)).stream_id) as followed,
    ):
        await followed.read(20)
        pair.gateways[0].process.kill()
        await followed.read()
    assert followed.text == expected_text(NUM_TOKENS)


async def test_a_gateway_that_was_frozen_shows_nothing_else_than_the_one_that_took_over(pair: Pair) -> None:
    frozen = pair.gateways[0].process
    async with pair.one.post("/v1/completions", pair.body()) as reading:
        await reading.read(20)
        frozen.send_signal(signal.SIGSTOP)
        async with pair.two.resumed(reading.stream_id) as elsewhere:
            await elsewhere.read(60)
            frozen.send_signal(signal.SIGCONT)
            await asyncio.gather(elsewhere.read(), reading.read())
    assert elsewhere.text == expected_text(NUM_TOKENS)
    # The client that has waited sees the same events, of which the other gateway has generated most.
    assert reading.events == elsewhere.events


async def test_a_gateway_that_is_stopped_leaves_its_streams_to_others(pair: Pair) -> None:
    async with pair.one.post("/v1/completions", pair.body(600)) as reading:
        await reading.read(20)
        pair.gateways[0].process.terminate()
        await read_until_cut(reading)
        assert b"shutting_down" in reading.others[0]
    rest, _ = await rest_of(pair.two, reading)
    check(reading, rest, expected_text(600))


async def test_a_stream_goes_on_when_nats_has_lost_its_memory(pair: Pair, nats: NatsServer) -> None:
    async with pair.one.post("/v1/completions", pair.body(1000)) as reading:
        await reading.read(50)
        nats.kill()
        await asyncio.sleep(0.5)
        nats.start()
        await reading.read(400)
        pair.gateways[0].process.kill()
        await read_until_cut(reading)
    rest, _ = await rest_of(pair.two, reading)
    check(reading, rest, expected_text(1000))


async def test_a_stream_that_is_followed_goes_on_when_nats_has_lost_its_memory(pair: Pair, nats: NatsServer) -> None:
    async with (
        pair.one.post("/v1/completions", pair.body(1000)) as reading,
        pair.two.resumed((await reading.read(5)).stream_id) as followed,
    ):
        await followed.read(50)
        nats.kill()
        await asyncio.sleep(0.5)
        nats.start()
        await asyncio.gather(followed.read(), reading.read())
    assert followed.text == expected_text(1000)
    assert reading.events == followed.events
