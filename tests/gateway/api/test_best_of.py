"""`best_of` through a gateway process: the worker says what each answer is and how likely its tokens are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.messages import Delta, Finish, Request, TokenLogprob, Usage
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import RawClient, connected
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker

__all__ = ["gateway", "nats_url"]

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture
async def worker(gateway: GatewayProcess, nats_url: str) -> AsyncIterator[WireWorker]:
    async with known_worker(nats_url, gateway, chat_format="hermes") as worker:
        yield worker


def body(worker: WireWorker, **fields: Any) -> dict[str, Any]:
    return {"model": worker.model, "messages": [{"role": "user", "content": "2+3?"}], "best_of": 3, "seed": 1, **fields}


async def say(worker: WireWorker, request: Request, text: str, logprobs: list[float], end: Finish) -> None:
    """Send one token for each log probability, behind those that are emitted; the last has the text."""
    assert request.reply is not None
    start = len(request.emitted)
    await worker.send(request.reply, [Delta(request.id, request.epoch, start, prompt_tokens=3)])
    for position, logprob in enumerate(logprobs, start):
        piece = text if position == start + len(logprobs) - 1 else ""
        entry = TokenLogprob(position, "a", b"a", logprob)
        await worker.send(
            request.reply, [Delta(request.id, request.epoch, position, (position,), piece, logprobs=(entry,))]
        )
    await worker.end(request, start + len(logprobs), end)


def done(num_tokens: int) -> Finish:
    return Finish("stop", Usage(3, num_tokens))


async def test_best_is_a_call_and_is_shared_and_repeated(
    gateway: GatewayProcess, worker: WireWorker, client: RawClient
) -> None:
    asked = body(worker, tools=[TOOL])
    client.post(PATH, asked)
    requests = [await worker.next_request() for _ in range(3)]
    assert [(request.sampling.seed, request.sampling.logprobs) for request in requests] == [(1, 0), (2, 0), (3, 0)]
    async with connected(gateway) as other:
        # It shares the sequences in flight, though it wants more of them.
        other.post(PATH, asked | {"n": 2})
        await say(worker, requests[0], "no", [-1.0, -3.0], done(2))
        await say(worker, requests[1], CALL, [-0.5, -0.5, -0.5], done(3))
        await say(worker, requests[2], "never", [-0.1, -3.0], done(2))
        status, first = await client.whole()
        _, both = await other.whole()
    assert status == 200
    [choice] = first["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "tool_calls", None)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
    assert first["usage"]["completion_tokens"] == 7
    assert [each["finish_reason"] for each in both["choices"]] == ["tool_calls", "stop"]
    assert both["choices"][1]["message"]["content"] == "never"
    # The answer is kept a moment after it was given.
    for _ in range(100):
        client.post(PATH, asked)
        repeated = asyncio.create_task(client.whole())
        waiting = asyncio.create_task(worker.next_request())
        await asyncio.wait([repeated, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
        waiting.cancel()
        if repeated.done():
            break
        for request in [waiting.result(), await worker.next_request(), await worker.next_request()]:
            await say(worker, request, CALL, [-0.5], done(1))
        await repeated
    _, again = repeated.result()
    assert again["usage"]["completion_tokens"] == 7
    assert again["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


async def test_tokens_before_a_move_to_another_worker_count(worker: WireWorker, client: RawClient) -> None:
    client.post(PATH, body(worker, best_of=2))
    moved, other = [await worker.next_request() for _ in range(2)]
    await say(worker, other, "middling", [-2.0, -2.0], done(2))
    # What comes behind the move alone would be the likeliest.
    await say(worker, moved, "first, ", [-6.0, -6.0], Finish("handoff"))
    again = await worker.next_request()
    assert (again.id, again.emitted) == (moved.id, (0, 1))
    await say(worker, again, "last", [-0.1], done(3))
    _, answer = await client.whole()
    assert answer["choices"][0]["message"]["content"] == "middling"
    assert answer["usage"]["completion_tokens"] == 5
