"""OpenAI's own client reads streams with ids, and goes on with one."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.gateway.gateway_process import API_KEY
from tests.gateway.resumable.stream_reader import Client
from tests.gateway.wire_worker import WireWorker, expected_text


def sdk(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key=API_KEY, max_retries=0, timeout=30)


async def test_the_official_client_reads_a_stream_with_ids_and_comments(worker: WireWorker, one: Client) -> None:
    options: Any = {"include_usage": True, "resumable": True}
    async with sdk(one) as client:
        stream = await client.chat.completions.create(
            model=worker.model,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=10,
            stream=True,
            stream_options=options,
        )
        request = await worker.next_request()
        first = await anext(stream)
        assert first.choices[0].delta.role == "assistant"
        await worker.complete(request, 0, 10)
        chunks = [first, *[chunk async for chunk in stream]]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected_text(10)
    assert chunks[-1].usage is not None


async def test_the_official_client_goes_on_with_a_stream(serving: WireWorker, one: Client, two: Client) -> None:
    options: Any = {"resumable": True}
    async with sdk(one) as client:
        raw = await client.completions.with_raw_response.create(
            model=serving.model, prompt="x", max_tokens=50, stream=True, stream_options=options
        )
        stream_id, stream = raw.headers["x-request-id"], raw.parse()
        read = []
        async for chunk in stream:
            read.append(chunk)
            if len(read) == 10:
                break
        await stream.close()
    async with sdk(two) as client:
        rest = await client.get(
            f"/streams/{stream_id}",
            cast_to=openai.types.Completion,
            stream=True,
            stream_cls=openai.AsyncStream[openai.types.Completion],
            options={"headers": {"Last-Event-ID": str(len(read) - 1)}},
        )
        read += [chunk async for chunk in rest]
    assert "".join(choice.text for chunk in read for choice in chunk.choices) == expected_text(50)


async def test_the_official_client_repeats_a_request_under_its_key(
    serving: WireWorker, one: Client, two: Client
) -> None:
    answers = []
    for each in (one, two):
        async with sdk(each) as client:
            answers.append(
                await client.completions.create(
                    model=serving.model,
                    prompt="x",
                    max_tokens=5,
                    extra_headers={"Idempotency-Key": f"sdk-{serving.model}"},
                )
            )
    assert answers[0] == answers[1]


async def test_an_event_source_comes_back_until_it_has_everything(
    serving: WireWorker, one: Client, two: Client
) -> None:
    """As the specification of `EventSource` has it: the last id of an event is sent when it connects again."""
    body = {"model": serving.model, "prompt": "x", "max_tokens": 60, "stream": True}
    async with one.post("/v1/completions", body | {"stream_options": {"resumable": True}}) as reading:
        await reading.read(1)
    data: list[str] = []
    last_event_id = "0"
    for attempt in range(100):
        async with (one, two)[attempt % 2].resumed(reading.stream_id, Last_Event_ID=last_event_id) as source:
            if source.response.status_code == 204:
                break
            assert source.response.headers["content-type"].startswith("text/event-stream")
            await source.read(10)
            for number, event in source.events.items():
                fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
                last_event_id = fields[b"id"].decode()
                assert last_event_id == str(number)
                data.append(fields[b"data"].decode())
    assert data[-1] == "[DONE]"
    texts = [choice["text"] for each in data[:-1] for choice in json.loads(each)["choices"]]
    assert "".join(texts) == expected_text(60)
