"""Requests as Codex and the AI SDK write them, which no typed client here would."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from gateway.responses.reasoning_seal import ReasoningSeals
from shared.messages import Request
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.responses.conftest import RESPONSES_SECRET
from tests.gateway.wire_worker import WireWorker

SEALS = ReasoningSeals([RESPONSES_SECRET])
SEALED = "the thought, sealed for the model that is asked"
FUNCTION = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "additionalProperties": False},
}
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": SEALED},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a.py"}]},
    ],
    "tools": [FUNCTION],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "service_tier": "auto",
    "client_metadata": {"x-codex-installation-id": "0199"},
}
AI_SDK: dict[str, Any] = {
    "input": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "id": "msg_1"},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "exec_command",
            "arguments": '{"cmd":"ls"}',
            "id": "fc_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "temperature": 0.5,
    "max_output_tokens": 100.0,
    "tools": [{**FUNCTION, "strict": None}],
    "tool_choice": {"type": "function", "name": "exec_command"},
    "text": {"format": {"type": "json_schema", "strict": True, "name": "answer", "schema": {"type": "object"}}},
    "store": None,
    "user": None,
}


async def _ask(gateway: GatewayProcess, worker: WireWorker, body: dict[str, Any]) -> tuple[Request, httpx2.Response]:
    """Send a body, answer `done`, and return what the worker got and what the client was answered."""
    worker.chat_format = "hermes"
    headers = {"Authorization": f"Bearer {API_KEY}"}
    sealed = SEALS.seal("default", worker.model, "reasoning", "rs_1", "There may be files.")
    items = [item | {"encrypted_content": sealed} if "encrypted_content" in item else item for item in body["input"]]
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client:
        beginning = asyncio.create_task(worker.begin(2))
        while True:
            asking = asyncio.create_task(
                client.post("/v1/responses", json={"model": worker.model, **body, "input": items})
            )
            await asyncio.wait([asking, beginning], return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                break
            # On a busy machine a grammar is not checked in time, and clients ask again when they are told to.
            answer = asking.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "grammar_not_checked"), answer.text
            await asyncio.sleep(float(answer.headers["retry-after"]))
        request = await beginning
        await worker.end(request, 2)
        return request, await asking


@pytest.mark.parametrize("body", [CODEX, AI_SDK], ids=["codex", "ai-sdk"])
async def test_conversation_of_an_agent_is_understood(
    gateway: GatewayProcess, worker: WireWorker, body: dict[str, Any]
) -> None:
    request, answer = await _ask(gateway, worker, body)
    assert answer.status_code == 200, answer.text
    assert request.messages is not None
    *_, user, assistant, tool = request.messages
    assert (user.role, user.content) == ("user", "list files")
    thought = "There may be files." if body is CODEX else None
    assert (assistant.content, assistant.reasoning) == ("I look.", thought)
    assert [(call.id, call.name, call.arguments) for call in assistant.tool_calls] == [
        ("call_1", "exec_command", '{"cmd":"ls"}')
    ]
    assert (tool.role, tool.content, tool.name) == ("tool", "a.py", "exec_command")
    assert request.chat is not None
    assert json.loads(request.chat.tools or "")[0]["function"]["name"] == "exec_command"


async def test_stream_ends_with_its_last_event_and_has_no_other_mark(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    _, answer = await _ask(gateway, worker, CODEX)
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        event, data = block.split("\n")
        assert event.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert blocks[-1].startswith("event: response.incomplete\n")


async def test_failure_after_the_first_output_ends_the_stream_with_a_failed_response(
    gateway: GatewayProcess, worker: WireWorker
) -> None:
    worker.chat_format = "hermes"
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client:
        body = {"model": worker.model, "input": "x", "stream": True, "timeout": 1.5}
        asking = asyncio.create_task(client.post("/v1/responses", json=body))
        await worker.begin(1)
        answer = await asking
    last = json.loads(answer.text.rstrip().split("\n")[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"]
