"""A repeated POST with an `Idempotency-Key`: joined while it runs, answered again later, refused with another body."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.messages import Finish
from tests.gateway.resumable.stream_reader import Client
from tests.gateway.wire_worker import WireWorker, expected_text
from tests.waiting import until


def body(worker: WireWorker, max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"model": worker.model, "prompt": "x", "max_tokens": max_tokens} | more


def key(worker: WireWorker) -> dict[str, str]:
    return {"idempotency-key": f"key-of-{worker.model}"}


async def test_repeated_requests_have_one_generation(worker: WireWorker, one: Client, two: Client) -> None:
    asking = [
        asyncio.create_task(client.ask("POST", "/v1/completions", body(worker), **key(worker)))
        for client in (one, two, one, two)
    ]
    request = await worker.next_request()
    await worker.complete(request, 0, 20)
    answers = [await each for each in asking]
    assert [status for status, _ in answers] == [200] * 4
    assert answers[0][1]["choices"][0]["text"] == expected_text(20)
    assert all(answer == answers[0] for answer in answers)
    for client in (one, two):
        assert await client.ask("POST", "/v1/completions", body(worker), **key(worker)) == answers[0]
    assert worker.requests.empty()


async def test_the_key_of_another_body_or_tenant(serving: WireWorker, one: Client, two: Client, other_key: str) -> None:
    first = await one.ask("POST", "/v1/completions", body(serving), **key(serving))
    assert first[0] == 200
    status, error = await two.ask("POST", "/v1/completions", body(serving, 21), **key(serving))
    assert (status, error["error"]["code"]) == (422, "idempotency_key_reused")
    assert error["error"]["param"] == "Idempotency-Key"
    other = await Client(two.url, other_key).ask("POST", "/v1/completions", body(serving), **key(serving))
    assert other[0] == 200
    assert other[1]["id"] != first[1]["id"]
    # Another endpoint is another request.
    chat = {"model": serving.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert (await one.ask("POST", "/v1/chat/completions", chat, **key(serving)))[0] == 200


@pytest.mark.parametrize("value", ["", "a b", "x" * 256, "\N{SNOWMAN}".encode()])
async def test_a_key_that_will_not_do_is_refused(worker: WireWorker, one: Client, value: Any) -> None:
    status, error = await one.ask("POST", "/v1/completions", body(worker), **{"Idempotency-Key": value})
    assert (status, error["error"]["param"]) == (400, "Idempotency-Key")
    assert "1 to 255 visible ASCII characters" in error["error"]["message"]


async def test_a_client_that_left_has_its_answer_when_it_repeats_its_request(
    worker: WireWorker, one: Client, two: Client
) -> None:
    asking = asyncio.create_task(one.ask("POST", "/v1/completions", body(worker), **key(worker)))
    request = await worker.begin(5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await worker.say(request, 5, 20)
    await worker.end(request, 20)
    status, answer = await two.ask("POST", "/v1/completions", body(worker), **key(worker))
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(20))


async def test_repeated_streams_are_the_same_stream(serving: WireWorker, one: Client, two: Client) -> None:
    fields = body(serving, 40, stream=True, stream_options={"resumable": True})
    async with one.post("/v1/completions", fields, **key(serving)) as first:
        await first.read(5)
        async with two.post("/v1/completions", fields, **key(serving)) as second:
            await asyncio.gather(first.read(), second.read())
    assert first.events == second.events
    assert first.stream_id == second.stream_id
    assert "idempotent-replayed" not in first.response.headers
    assert second.response.headers["idempotent-replayed"] == "true"
    # Without ids, too.
    fields = body(serving, 40, stream=True)
    async with one.post("/v1/completions", fields, **{"idempotency-key": f"{serving.model}/2"}) as first:
        await first.read()
    async with two.post("/v1/completions", fields, **{"idempotency-key": f"{serving.model}/2"}) as second:
        await second.read()
    assert first.others == second.others
    assert len(first.others) > 40
    # A stream that was not to be resumed is not found under its id.
    assert (await one.ask("GET", f"/v1/streams/{first.stream_id}"))[0] == 404


async def test_a_request_that_failed_can_be_made_again(worker: WireWorker, one: Client, two: Client) -> None:
    asking = asyncio.create_task(one.ask("POST", "/v1/completions", body(worker), **key(worker)))
    request = await worker.begin()
    await worker.end(request, 0, Finish("failed", error="out of luck"))
    status, _ = await asking
    assert status == 500
    # Until its end is logged, whoever asks again is told the same.
    while worker.requests.empty():
        asking = asyncio.create_task(two.ask("POST", "/v1/completions", body(worker), **key(worker)))
        await until(lambda asking=asking: asking.done() or not worker.requests.empty())
    await worker.complete(await worker.next_request(), 0, 20)
    status, answer = await asking
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(20))


async def test_a_request_that_was_refused_can_be_made_again(worker: WireWorker, one: Client, two: Client) -> None:
    fields = body(worker) | {"model": "nobody-serves-this"}
    assert (await one.ask("POST", "/v1/completions", fields, **key(worker)))[0] == 404
    asking = asyncio.create_task(two.ask("POST", "/v1/completions", body(worker), **key(worker)))
    await worker.complete(await worker.next_request(), 0, 20)
    assert (await asking)[0] == 200


async def test_nobody_waits_for_a_request_that_was_made_with_a_key(worker: WireWorker, one: Client) -> None:
    asking = asyncio.create_task(one.ask("POST", "/v1/completions", body(worker), **key(worker)))
    request = await worker.begin(5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels), timeout_s=5)
