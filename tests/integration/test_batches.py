"""Batches through the whole system: a line's answer is what its endpoint answers, and its tokens are in the usage."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from tests.integration.system import System
from tests.integration.test_tools import ASKED, TOOL
from tests.waiting import wait_for

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def first(items):"}], "max_tokens": 12},
    "/v1/completions": {"prompt": "def first(items):", "max_tokens": 12, "n": 2, "seed": 3, "temperature": 0.5},
    "/v1/responses": {"input": "def first(items):", "max_output_tokens": 12},
    "/v1/embeddings": {"input": ["first", "second"]},
}


def batch_of(client: openai.OpenAI, endpoint: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute bodies as a batch, and return the responses in the order of the lines."""
    rows = [{"custom_id": f"{n:03d}", "method": "POST", "url": endpoint, "body": body} for n, body in enumerate(bodies)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in rows)
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]
    wait_for(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled"), 60)
    batch = client.batches.retrieve(batch.id)
    output = batch.output_file_id or batch.error_file_id
    assert output is not None, batch
    answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    return [line["response"] for line in sorted(answers, key=lambda line: line["custom_id"])]


def told(answer: dict[str, Any]) -> Any:
    """Return what an answer says, without its ids and times."""
    if answer["object"] == "list":
        return [each["embedding"] for each in answer["data"]], answer["usage"]
    if answer["object"] == "response":
        texts = [each["content"][0]["text"] for each in answer["output"]]
        return texts, answer["status"], answer["usage"]["output_tokens"]
    choices = [{**each, "stop_reason": None} for each in answer["choices"]]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("endpoint", BODIES)
def test_line_is_answered_as_its_endpoint_answers(system: System, endpoint: str) -> None:
    body = {"model": system.model, "temperature": 0, **BODIES[endpoint]}
    if endpoint == "/v1/embeddings":
        del body["temperature"]
    client = system.client()
    answer = batch_of(client, endpoint, [body])[0]["body"]
    direct = client.post(endpoint, body=body, cast_to=object)
    assert isinstance(direct, dict)
    assert told(answer) == told(direct)
    assert answer.keys() - {"system_fingerprint"} == direct.keys() - {"system_fingerprint"}


def test_line_with_tools_calls_them_as_its_endpoint_does(system: System) -> None:
    function = TOOL["function"]
    asked = {"model": system.model, "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    chat = {**asked, "messages": ASKED, "tools": [TOOL], "max_tokens": 100}
    response = {**asked, "input": ASKED, "tools": [{"type": "function", **function}], "max_output_tokens": 100}
    client = system.client()
    direct = client.post("/v1/chat/completions", body=chat, cast_to=ChatCompletion)
    [answer] = batch_of(client, "/v1/chat/completions", [chat])
    [choice] = ChatCompletion.model_validate(answer["body"]).choices
    assert choice.finish_reason == direct.choices[0].finish_reason == "tool_calls"
    assert functions_of(choice) == functions_of(direct.choices[0])
    [answer] = batch_of(client, "/v1/responses", [response])
    [call] = answer["body"]["output"]
    assert (call["name"], call["arguments"]) == functions_of(choice)[0]


def functions_of(choice: Choice) -> list[tuple[str, str]]:
    calls = choice.message.tool_calls or []
    return [(each.function.name, each.function.arguments) for each in calls if each.type == "function"]


def test_line_that_no_worker_can_compute_ends_with_the_endpoints_error(system: System) -> None:
    long = {"model": system.model, "prompt": "x " * 20_000, "max_tokens": 4}
    client = system.client()
    with pytest.raises(openai.BadRequestError) as direct:
        client.post("/v1/completions", body=long, cast_to=object)
    (response,) = batch_of(client, "/v1/completions", [long])
    assert response["status_code"] == 400
    assert response["body"]["error"]["code"] == direct.value.code
