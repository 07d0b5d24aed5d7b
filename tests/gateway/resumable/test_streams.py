"""Streams of two gateways: read again, gone on with, stopped, listed; and whoever may not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.resumable.stream_reader import Client
from tests.gateway.wire_worker import WireWorker, expected_text
from tests.waiting import until


def completion(worker: WireWorker, max_tokens: int = 30, **more: Any) -> dict[str, Any]:
    options = {"resumable": True, "include_usage": True}
    body = {"model": worker.model, "prompt": "x", "max_tokens": max_tokens, "stream": True, "stream_options": options}
    return body | more


async def test_a_stream_is_told_again_with_the_same_bytes_by_both_gateways(
    serving: WireWorker, one: Client, two: Client
) -> None:
    async with one.post("/v1/completions", completion(serving)) as reading:
        await reading.read()
    assert reading.text == expected_text(30)
    assert list(reading.events) == list(range(len(reading.events)))
    assert reading.events[len(reading.events) - 1].endswith(b"data: [DONE]")
    assert reading.objects[-1]["usage"]["completion_tokens"] == 30
    for client in (one, two):
        async with client.resumed(reading.stream_id) as again:
            await again.read()
        assert again.events == reading.events
        assert again.stream_id == reading.stream_id


async def test_a_running_stream_goes_on_after_any_event_at_the_other_gateway(
    serving: WireWorker, one: Client, two: Client
) -> None:
    async with one.post("/v1/completions", completion(serving, 100)) as reading:
        await reading.read(10)
        last = max(reading.events)
        async with two.resumed(reading.stream_id, Last_Event_ID=str(last)) as rest:
            await rest.read()
        async with one.resumed(reading.stream_id, f"?from={last + 1}") as other:
            await other.read()
    assert rest.events == other.events
    assert min(rest.events) == last + 1
    assert reading.text + rest.text == expected_text(100)


async def test_two_clients_read_one_stream(serving: WireWorker, one: Client, two: Client) -> None:
    async with one.post("/v1/completions", completion(serving, 60)) as first:
        await first.read(1)
        async with one.resumed(first.stream_id) as second, two.resumed(first.stream_id) as third:
            await asyncio.gather(first.read(), second.read(), third.read())
    assert first.events == second.events == third.events


async def test_the_first_event_comes_before_any_token(worker: WireWorker, one: Client) -> None:
    async with one.post("/v1/completions", completion(worker, 3)) as reading:
        await reading.read(1)
        assert reading.objects[0]["choices"][0]["text"] == ""
        request = await worker.next_request()
        async with one.resumed(reading.stream_id) as other:
            await other.read(1)
            assert other.events == reading.events
            await worker.complete(request, 0, 3)
            await other.read()
        assert other.text == expected_text(3)


@pytest.mark.parametrize("query", ["-1", "x", "1.5", "99999999999999999999", "", "%D9%A1"])
async def test_a_from_that_is_no_number_is_refused(serving: WireWorker, one: Client, query: str) -> None:
    async with one.post("/v1/completions", completion(serving, 2)) as reading:
        await reading.read()
    status, error = await one.ask("GET", f"/v1/streams/{reading.stream_id}?from={query}")
    assert (status, error["error"]["param"]) == (400, "from")
    assert "whole number from 0 to 1000000000" in error["error"]["message"]


async def test_positions_beyond_the_end_are_told(serving: WireWorker, one: Client, two: Client) -> None:
    async with one.post("/v1/completions", completion(serving, 2)) as reading:
        await reading.read()
    path, num_events = f"/v1/streams/{reading.stream_id}", len(reading.events)
    for client in (one, two):
        # A browser that gets a 204 does not come back.
        assert await client.ask("GET", path, **{"Last-Event-ID": str(num_events - 1)}) == (204, None)
        status, error = await client.ask("GET", f"{path}?from={num_events + 1}")
        assert status == 400, error
        assert f"has {num_events} events" in error["error"]["message"]
        status, error = await client.ask("GET", path, **{"Last-Event-ID": "99999"})
        assert (status, f"'Last-Event-ID' at most {num_events - 1}." in error["error"]["message"]) == (400, True)
    async with one.post("/v1/completions", completion(serving, 200)) as running:
        await running.read(5)
        status, error = await one.ask("GET", f"/v1/streams/{running.stream_id}?from=10000")
        assert (status, error["error"]["param"]) == (400, "from")
    status, error = await one.ask("GET", f"{path}?from=1", **{"Last-Event-ID": "1"})
    assert status == 400
    status, error = await one.ask("GET", f"{path}?form=1")
    assert (status, error["error"]["param"]) == (400, "form")


async def test_a_stream_of_another_tenant_is_not_found(
    serving: WireWorker, gateways: list[GatewayProcess], one: Client, other_key: str
) -> None:
    foreigners = [Client(gateway.url, other_key) for gateway in gateways]
    async with one.post("/v1/completions", completion(serving, 100)) as reading:
        await reading.read(3)
        for foreigner in foreigners:
            for method in ("GET", "DELETE"):
                found = await foreigner.ask(method, f"/v1/streams/{reading.stream_id}")
                unknown = await foreigner.ask(method, f"/v1/streams/{reading.stream_id[:-1]}x")
                assert found[0] == unknown[0] == 404
                assert found[1]["error"]["code"] == unknown[1]["error"]["code"] == "stream_not_found"
            assert await foreigner.ask("GET", "/v1/streams") == (200, {"object": "list", "data": [], "has_more": False})
        status, _ = await Client(one.url, "sk-none").ask("GET", f"/v1/streams/{reading.stream_id}")
        assert status == 401
        await reading.read()
    assert reading.text == expected_text(100)
    for stream_id in ("a" * 129, "%00", "*", ">", "a.b", "%ff"):
        status, error = await one.ask("GET", f"/v1/streams/{stream_id}")
        assert (status, error["error"]["code"]) == (404, "stream_not_found"), stream_id


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/streams"), ("DELETE", "/v1/streams/unknown")])
async def test_lists_and_deletions_count_against_the_reads_of_their_key(
    gateways: list[GatewayProcess], slow_key: str, method: str, path: str
) -> None:
    slow = Client(gateways[0].url, slow_key)
    answers = [await slow.ask(method, path) for _ in range(3)]
    assert answers[-1][0] == 429, answers
    assert answers[-1][1]["error"]["code"] == "rate_limit_exceeded"


async def test_reading_a_large_stream_counts_once_for_each_64_kb(nats_url: str, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", tenant="large", reads_per_minute=3)[1]
    settings: dict[str, Any] = {"keys_file": tmp_path / "keys.json", "resume_stream_bytes": 1 << 20}
    with running_gateway(tmp_path / "gateway", nats_url, **settings) as gateway:
        async with known_worker(nats_url, gateway) as worker:
            task = asyncio.create_task(worker.serve(0.0))
            client = Client(gateway.url, key)
            async with client.post("/v1/completions", completion(worker, 5000)) as reading:
                await reading.read()
            task.cancel()
        assert len(reading.events) > 5000
        statuses = []
        for _ in range(3):
            async with client.resumed(reading.stream_id) as again:
                statuses.append(again.response.status_code)
                await again.read()
        assert statuses == [200, 429, 429]


async def test_running_streams_are_listed_until_they_end(serving: WireWorker, one: Client, two: Client) -> None:
    async with one.post("/v1/completions", completion(serving, 100)) as reading:
        await reading.read(3)
        for client in (one, two):
            _, listed = await client.ask("GET", "/v1/streams")
            (info,) = [each for each in listed["data"] if each["id"] == reading.stream_id]
            assert (info["object"], info["model"], info["endpoint"]) == ("stream", serving.model, "/v1/completions")
        status, refused = await one.ask("GET", "/v1/streams?limit=1")
        assert (status, refused["error"]["param"]) == (400, "limit")
        await reading.read()
    for _ in range(100):
        _, listed = await two.ask("GET", "/v1/streams")
        if reading.stream_id not in [each["id"] for each in listed["data"]]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the stream has ended, and is listed")


@pytest.mark.parametrize("place", [0, 1])
async def test_a_deleted_stream_stops_and_is_gone(worker: WireWorker, one: Client, two: Client, place: int) -> None:
    async with one.post("/v1/completions", completion(worker, 100)) as reading:
        request = await worker.begin(5)
        await reading.read(6)
        path = f"/v1/streams/{reading.stream_id}"
        status, answer = await (one, two)[place].ask("DELETE", path)
        assert (status, answer) == (200, {"id": reading.stream_id, "object": "stream", "deleted": True})
        await reading.read()
        assert "stream_stopped" in str(reading.objects[-1])
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    for client in (one, two):
        for method in ("DELETE", "GET"):
            for _ in range(100):
                status, _ = await client.ask(method, path)
                if status == 404:
                    break
                await asyncio.sleep(0.02)
            assert status == 404


async def test_a_stream_that_has_ended_can_be_deleted_once(serving: WireWorker, one: Client, two: Client) -> None:
    async with one.post("/v1/completions", completion(serving, 3)) as reading:
        await reading.read()
    async with two.resumed(reading.stream_id) as logged:
        await logged.read()
    path = f"/v1/streams/{reading.stream_id}"
    assert [(await two.ask("DELETE", path))[0], (await two.ask("DELETE", path))[0]] == [200, 404]
    assert (await one.ask("GET", path))[0] == 404


async def test_a_stream_goes_on_without_its_client_and_is_cancelled_after_the_grace_period(
    worker: WireWorker, one: Client, two: Client
) -> None:
    async with one.post("/v1/completions", completion(worker, 100)) as reading:
        request = await worker.begin(2)
        await reading.read(3)
    await worker.say(request, 2, 6)
    async with two.resumed(reading.stream_id, f"?from={max(reading.events) + 1}") as back:
        await back.read(4)
        # Somebody reads at the other gateway: the generation goes on for as long as that.
        await asyncio.sleep(1.5)
        await worker.say(request, 6, 8)
        await back.read(6)
    assert reading.text + back.text == expected_text(8)
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels), timeout_s=5)
    async with two.resumed(reading.stream_id) as ended:
        await ended.read()
    assert ended.text == expected_text(8)
    assert ended.objects[-1]["error"]["code"] == "stream_abandoned"


async def test_a_stream_whose_log_is_too_large_is_read_to_its_end_and_not_resumed(
    serving: WireWorker, one: Client, two: Client
) -> None:
    async with one.post("/v1/completions", completion(serving, 900)) as reading:
        await reading.read()
    assert reading.text == expected_text(900)
    for client in (one, two):
        status, error = await client.ask("GET", f"/v1/streams/{reading.stream_id}")
        assert (status, error["error"]["code"]) == (410, "stream_expired")


async def test_a_request_id_that_is_taken_is_refused(serving: WireWorker, one: Client, two: Client) -> None:
    name = {"x-request-id": f"mine/{serving.model}"}
    async with one.post("/v1/completions", completion(serving, 20), **name) as reading:
        await reading.read()
    assert reading.stream_id == name["x-request-id"]
    async with two.resumed(reading.stream_id) as again:
        await again.read()
    assert again.events == reading.events
    status, error = await two.ask("POST", "/v1/completions", completion(serving, 20), **name)
    assert (status, error["error"]["code"]) == (409, "stream_exists")


async def test_an_id_that_ends_with_a_slash_is_found(serving: WireWorker, one: Client, two: Client) -> None:
    ids = [f"slash/{serving.model}/", f"slash/{serving.model}", f"/{serving.model}//"]
    for stream_id in ids:
        async with one.post("/v1/completions", completion(serving, 5), **{"x-request-id": stream_id}) as reading:
            await reading.read()
        async with two.resumed(stream_id) as again:
            await again.read()
        assert (again.stream_id, again.events) == (stream_id, reading.events)
    # Without a stream of that id, a slash at the end of a path is left out, as in other paths.
    for status, given in ((200, ids[0]), (200, ids[0]), (404, ids[1])):
        assert (await two.ask("DELETE", f"/v1/streams/{given}"))[0] == status


async def test_a_request_id_that_could_be_a_response_is_refused(serving: WireWorker, one: Client) -> None:
    name = {"x-request-id": f"resp_{'0a' * 16}"}
    status, error = await one.ask("POST", "/v1/completions", completion(serving), **name)
    assert (status, error["error"]["code"], error["error"]["param"]) == (400, "invalid_value", "x-request-id")


async def test_an_answer_without_a_stream_is_not_resumable(worker: WireWorker, one: Client) -> None:
    body = completion(worker) | {"stream": False, "stream_options": {"resumable": True}}
    status, error = await one.ask("POST", "/v1/completions", body)
    assert (status, error["error"]["param"]) == (400, "stream_options")
    body = {"model": worker.model, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    status, error = await one.ask("POST", "/v1/messages", body | {"stream_options": {"resumable": True}})
    assert status == 400
    assert "stream_options" in error["error"]["message"]


async def test_chat_and_messages_are_told_again_with_the_same_bytes(
    serving: WireWorker, one: Client, two: Client
) -> None:
    body = {"model": serving.model, "max_tokens": 20, "messages": [{"role": "user", "content": "x"}], "stream": True}
    body["stream_options"] = {"resumable": True}
    for path in ("/v1/chat/completions", "/v1/messages"):
        async with one.post(path, body) as reading:
            await reading.read(1)
            async with two.resumed(reading.stream_id) as followed:
                await asyncio.gather(reading.read(), followed.read())
        async with two.resumed(reading.stream_id) as again:
            await again.read()
        assert reading.events == again.events == followed.events
        texts = [str(each) for each in reading.objects]
        assert len(texts) > 20
        if path == "/v1/messages":
            assert [each["type"] for each in reading.objects[:2]] == ["ping", "message_start"]
            assert reading.objects[-1]["type"] == "message_stop"


async def test_calls_of_tools_have_the_same_ids_when_told_again(
    gateways: list[GatewayProcess], nats_url: str, one: Client, two: Client
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    own = {"name": "f", "input_schema": {"type": "object"}}
    base = {"max_tokens": 200, "messages": [{"role": "user", "content": "x"}], "stream": True}
    base["stream_options"] = {"resumable": True}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    async with known_worker(nats_url, *gateways, chat_format="hermes") as worker:
        for path, tools in (("/v1/chat/completions", [tool]), ("/v1/messages", [own])):
            async with one.post(path, base | {"model": worker.model, "tools": tools}) as reading:
                request = await worker.next_request()
                await worker.answer(request, call)
                await reading.read()
            async with two.resumed(reading.stream_id) as again:
                await again.read()
            assert again.events == reading.events
            assert any("call_" in str(each) or "toolu_" in str(each) for each in reading.objects), reading.events


async def test_several_choices_are_told_again_with_the_same_bytes(
    serving: WireWorker, one: Client, two: Client
) -> None:
    async with one.post("/v1/completions", completion(serving, 30, n=3, logprobs=None)) as reading:
        await reading.read(10)
        async with two.resumed(reading.stream_id) as followed:
            await asyncio.gather(reading.read(), followed.read())
    assert followed.events == reading.events
    texts = ["", "", ""]
    for each in reading.objects:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected_text(30)] * 3


async def test_many_reconnections_leave_nothing_behind(serving: WireWorker, one: Client, two: Client) -> None:
    async with one.post("/v1/completions", completion(serving, 400)) as reading:
        await reading.read(3)
        last, text = max(reading.events), reading.text
        for attempt in range(60):
            async with (one, two)[attempt % 2].resumed(reading.stream_id, Last_Event_ID=str(last)) as part:
                await part.read(4)
            if not part.events:
                break
            last, text = max(part.events), text + part.text
        await reading.read()
    assert reading.text.startswith(text)
    assert reading.text == expected_text(400)
    assert json.dumps(reading.objects)
