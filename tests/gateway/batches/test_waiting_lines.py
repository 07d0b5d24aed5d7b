"""Lines whose model has no worker wait, and hold up neither the other lines nor the end of their batch."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from shared.batch_streams import batch_stream
from tests.gateway.batches.conftest import EchoWorker, Place
from tests.gateway.batches.test_batches import ended, jsonl, line, lines_of, submitted
from tests.gateway.batches.test_deaths import assert_each_line_once, killed, quick
from tests.gateway.wire_worker import WireWorker
from tests.waiting import until


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
async def test_lines_with_tools_end_with_their_batch_while_no_worker_says_how_tools_are_called(
    client: openai.AsyncOpenAI, worker: EchoWorker, reason: str
) -> None:
    body = line(0, "away")["body"] | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    data = jsonl([line(each, "away", body=body) for each in range(3)])
    window = {"completion_window": "3s"} if reason == "expired" else {}
    batch = await submitted(client, data, **window)
    # Now they wait to be published.
    await asyncio.sleep(1.5)
    if reason == "cancelled":
        await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == reason
    assert batch.output_file_id is None
    errors = await lines_of(client, batch.error_file_id)
    assert sorted(each["custom_id"] for each in errors) == ["line-0", "line-1", "line-2"]
    assert {each["error"]["code"] for each in errors} == {f"batch_{reason}"}
    assert worker.computed == []


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}


def with_tools(number: int, model: str) -> dict[str, Any]:
    return line(number, model, body=line(number, model)["body"] | TOOLS)


def beating(place: Place) -> WireWorker:
    """Return what sends the heartbeats of the batch lane's worker."""
    worker = WireWorker(place.nats_url, "m", "w-m")
    worker.chat_format = "hermes"
    return worker


async def test_lines_that_wait_for_their_model_hold_up_no_line_of_another(
    client: openai.AsyncOpenAI, worker: EchoWorker
) -> None:
    lines = [with_tools(number, "away") for number in range(100)]
    lines += [line(number, worker.model) for number in range(100, 200)]
    batch = await submitted(client, jsonl(lines))
    await until(lambda: len(worker.computed) == 100, 10)
    await client.batches.cancel(batch.id)
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    answers, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert {each["custom_id"] for each in answers} == {f"line-{number}" for number in range(100, 200)}
    assert sorted(each["custom_id"] for each in errors) == sorted(f"line-{number}" for number in range(100))
    assert len(answers) == 100


async def test_lines_that_waited_for_their_model_are_computed_once_it_is_there(own: tuple[Place, EchoWorker]) -> None:
    place, worker = own
    with place.gateway("gateway") as gateway:
        async with place.client(gateway) as client:
            batch = await submitted(client, jsonl([with_tools(number, "m") for number in range(100)]))
            await asyncio.sleep(1.5)
            assert worker.computed == []
            async with beating(place):
                await assert_each_line_once(client, batch.id, 100, 30)
    assert len(worker.computed) == 100


async def test_results_are_taken_by_a_new_driver_while_their_model_is_away(
    own: tuple[Place, EchoWorker],
) -> None:
    place, worker = own
    worker.answer = lambda request: None
    with place.gateway("first") as first:
        async with place.client(first) as client, beating(place):
            batch = await submitted(client, jsonl([with_tools(number, "m") for number in range(8)]))
            streams = worker.nats.jetstream()
            while (await streams.stream_info(batch_stream("default"))).state.messages < 8:  # noqa: ASYNC110 - none tells
                await asyncio.sleep(0.05)
        killed(first)
    quick(worker)
    await until(lambda: len(worker.computed) == 8)
    with place.gateway("second") as second:
        async with place.client(second) as client:
            await assert_each_line_once(client, batch.id, 8, 30)
    assert len(worker.computed) == 8
