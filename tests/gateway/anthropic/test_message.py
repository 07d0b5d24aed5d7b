"""Messages, whole and streamed: what clients get of text, thinking and calls, and how errors are told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from gateway.admission.auth import Principal
from gateway.anthropic.dialect import ANTHROPIC, BlockList
from gateway.anthropic.message import StreamedMessage, WholeMessage
from gateway.api.answer import Answer, Asked, ResponseHead, StreamParts
from gateway.errors import ApiError
from gateway.generation import OutputReading
from gateway.streams.event_stream import Flusher
from shared.messages import Delta, Finish, Usage
from shared.sampling import Sampling
from tests.gateway.api.scripted_reader import ScriptedReader
from tests.gateway.api.test_streamed import LIMITS
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.kept_exchange import kept_exchange
from tests.gateway.known_worker import known_worker
from tests.gateway.parsed_bodies import generation
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import expected_text

READING = OutputReading(ScriptedReader)
USAGE = Usage(7, 5, 2)
PIECES = ["R:Let me", "R: think.", "C:I will", "C: add.", "S:add", 'A:{"a":', "A:1}", "S:sub", "A:{}"]


class Case:
    """A message on a transport that keeps what it is given."""

    def __init__(self, *, stream: bool, reading: OutputReading | None = READING) -> None:
        exchange, _, self.transport = kept_exchange()
        asking = generation(sampling=Sampling(max_tokens=5), stream=stream, reading=reading)
        asked = Asked(exchange, asking, ResponseHead("req_1", 0.0, ANTHROPIC), Principal("k", "t"))
        self.answer: Answer = WholeMessage(asked)
        if stream:
            flusher = Flusher(asyncio.get_running_loop())
            self.answer = StreamedMessage(asked, StreamParts(flusher, LIMITS, 0.0))
        self.deliver(Delta("r", 0, 0, prompt_tokens=7))

    def deliver(self, delta: Delta) -> None:
        self.answer.sinks[0].deliver(delta)

    def say(self, pieces: list[str], finish: Finish | None = None) -> None:
        for position, piece in enumerate(pieces):
            self.deliver(Delta("r", 0, position, (position,), piece))
        if finish is not None:
            self.deliver(Delta("r", 0, len(pieces), finish=finish))

    @property
    def sent(self) -> bytes:
        return self.transport.sent

    def body(self) -> dict[str, Any]:
        return self.transport.body()  # type: ignore[no-any-return]

    def events(self) -> list[dict[str, Any]]:
        """Return the data of all events, whose names agree with it."""
        found = []
        for line in self.sent.split(b"\n\n"):
            name, has_data, data = line.rpartition(b"event: ")[2].partition(b"\ndata: ")
            if has_data:
                found.append(json.loads(data))
                assert found[-1]["type"] == name.decode()
        return found


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks of a stream together as a client does."""
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            inputs.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[-1] += delta["partial_json"]
            else:
                blocks[-1][delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
        elif event["type"] == "content_block_stop" and inputs[-1]:
            blocks[-1]["input"] = json.loads(inputs[-1])
    return blocks


async def streamed(pieces: list[str], finish: Finish, reading: OutputReading | None = READING) -> list[dict[str, Any]]:
    case = Case(stream=True, reading=reading)
    case.say(pieces, finish)
    await asyncio.sleep(0)
    return case.events()


async def whole(pieces: list[str], finish: Finish, reading: OutputReading | None = READING) -> dict[str, Any]:
    case = Case(stream=False, reading=reading)
    case.say(pieces, finish)
    return case.body()


async def test_whole_message_has_its_blocks_in_order() -> None:
    message = await whole(PIECES, Finish("stop", USAGE))
    ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me think.", "signature": "unsigned"},
        {"type": "text", "text": "I will add."},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "name": "sub", "input": {}},
    ]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
    assert message["id"].startswith("msg_")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    assert "output_tokens_details" not in (await whole(["C:x"], Finish("stop", USAGE)))["usage"]


async def test_stream_says_what_the_whole_message_says() -> None:
    events = await streamed(PIECES, Finish("stop", USAGE))
    message = await whole(PIECES, Finish("stop", USAGE))
    started = events[0]["message"]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert (started["content"], started["stop_reason"], started["usage"]["input_tokens"]) == ([], None, 7)
    for block in message["content"] + (blocks := assembled(events)):
        block.pop("id", None)
    assert blocks == message["content"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == message["usage"]
    opened = [event["index"] for event in events if event["type"] == "content_block_start"]
    closed = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]


async def test_why_a_message_stopped_is_told() -> None:
    ends = [
        (Finish("stop", USAGE), ["C:x"], ("end_turn", None)),
        (Finish("stop", USAGE, stop="END"), ["C:x"], ("stop_sequence", "END")),
        (Finish("stop", USAGE, stop=5), ["C:x"], ("end_turn", None)),
        (Finish("stop", USAGE, stop="END"), ["S:add", "A:{}"], ("tool_use", "END")),
        (Finish("length", USAGE), ["C:x"], ("max_tokens", None)),
        (Finish("length", USAGE), ["S:add", "A:{"], ("max_tokens", None)),
        (Finish("length", Usage(7, 4)), ["C:x"], ("model_context_window_exceeded", None)),
    ]
    for finish, pieces, expected in ends:
        message = await whole(pieces, finish)
        assert (message["stop_reason"], message["stop_sequence"]) == expected
        delta = (await streamed(pieces, finish))[-2]["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == expected


async def test_call_that_is_cut_off_shows_what_there_is() -> None:
    pieces = ["S:add", 'A:{"a": "x']
    assert (await whole(pieces, Finish("length", USAGE)))["content"][0]["input"] == {}
    texts = [
        event["delta"]["partial_json"]
        for event in await streamed(pieces, Finish("length", USAGE))
        if "delta" in event and "partial_json" in event["delta"]
    ]
    assert texts == ['{"a": "x']


async def test_answer_without_reading_is_text() -> None:
    message = await whole(["C:<b>", "S:"], Finish("stop", USAGE), None)
    assert message["content"] == [{"type": "text", "text": "C:<b>S:"}]
    assert assembled(await streamed(["C:<b>", "S:"], Finish("stop", USAGE), None)) == message["content"]


async def test_first_output_is_written_at_once() -> None:
    case = Case(stream=True)
    case.say(["C:a"])
    assert [event["type"] for event in case.events()] == ["message_start", "content_block_start", "content_block_delta"]


async def test_failure_before_and_in_the_stream_is_told_in_anthropics_form() -> None:
    error = ApiError(503, "Full.", retry_after_s=2)
    for case in (Case(stream=False), Case(stream=True)):
        case.answer.fail(error)
        assert case.sent.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2" in case.sent
        assert case.body() == {"type": "error", "error": {"type": "overloaded_error", "message": "Full."}}
    case = Case(stream=True)
    case.say(["C:a"])
    case.answer.fail(ApiError(500, "Broken."))
    assert case.events()[-1] == {"type": "error", "error": {"type": "api_error", "message": "Broken."}}
    assert b"[DONE]" not in case.sent


@pytest.mark.parametrize("arguments", ['{"a":' * 5000 + "1" + "}" * 5000, "[" * 5000, '{"a": 1', ""])
def test_call_whose_arguments_cannot_be_read_has_an_empty_input(arguments: str) -> None:
    blocks = BlockList(str)
    blocks.call("f")
    blocks.arguments(arguments)
    assert [block["input"] for block in blocks.blocks()] == [{}]


__all__ = ["gateway", "nats_url"]


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]} | fields


async def test_message_is_answered_whole_and_streamed(gateway: GatewayProcess, nats_url: str) -> None:
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers=headers) as http:
        serving = asyncio.create_task(worker.serve())
        answer = await http.post(f"{gateway.url}/v1/messages", json=body(worker.model))
        assert answer.status_code == 200
        assert answer.json()["content"] == [{"type": "text", "text": expected_text(8)}]
        assert answer.json()["stop_reason"] == "max_tokens"
        assert answer.json()["usage"]["input_tokens"] == 3
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        answer = await http.post(f"{gateway.url}/v1/messages", json=body(worker.model, stream=True))
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        expected = ["message_start", "content_block_start", *["content_block_delta"] * 8, "content_block_stop"]
        assert names == [*expected, "message_delta", "message_stop"]
        serving.cancel()


async def test_stop_sequence_is_named(gateway: GatewayProcess, nats_url: str) -> None:
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers={"x-api-key": API_KEY}) as http:
        url = f"{gateway.url}/v1/messages"
        asking = asyncio.create_task(http.post(url, json=body(worker.model, stop_sequences=["END"])))
        request = await worker.begin(2)
        assert request.sampling.stop == ("END",)
        await worker.end(request, 2, Finish("stop", Usage(3, 2), stop="END"))
        message = (await asking).json()
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_errors_of_every_path_have_the_form_of_the_client_that_asks(gateway: GatewayProcess) -> None:
    own, key = {"anthropic-version": "2023-06-01"}, {"x-api-key": API_KEY}
    async with httpx2.AsyncClient(base_url=gateway.url) as http:
        for path, headers, status, kind in (
            ("/v1/files", key, 404, "not_found_error"),
            ("/v1/models/nope", key, 404, "not_found_error"),
            ("/v1/models", {}, 401, "authentication_error"),
        ):
            error = (await http.get(path, headers=headers)).json()
            assert set(error) == {"error"}
            assert set(error["error"]) == {"message", "type", "param", "code"}
            answer = await http.get(path, headers=headers | own)
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_errors_have_anthropics_form(gateway: GatewayProcess, nats_url: str) -> None:
    # While no worker at all is heard no model is unknown.
    async with known_worker(nats_url, gateway), httpx2.AsyncClient() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            url = gateway.url + path
            answer = await http.post(url, json=body("m"))
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            answer = await http.post(url, json=body("nobody"), headers={"x-api-key": API_KEY})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            answer = await http.post(url, json=body("m", messages=5), headers={"x-api-key": API_KEY})
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            )
            assert "messages" in error["error"]["message"]
