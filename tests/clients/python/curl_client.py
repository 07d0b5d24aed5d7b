"""Plain HTTP, as a shell script would speak it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from cells import KEY, MODEL, POINT, SCHEMA, URL, check_person, run

MESSAGES = [{"role": "user", "content": "Somebody, please."}]
FUNCTION = {"name": "person", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


def curl(path: str, body: dict[str, Any] | None = None, status: int = 200) -> str:
    """Send a body, or ask; return the answer's body."""
    command = ["curl", "-sS", "-N", "-m", "120", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {KEY}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps({"model": MODEL, **body})]
    done = subprocess.run([*command, f"{URL}{path}"], capture_output=True, text=True, check=True)
    answer, _, code = done.stdout.rpartition("\n")
    assert int(code) == status, done.stdout
    return answer


def ask(path: str, **body: object) -> Any:
    return json.loads(curl(path, body))


def events(path: str, **body: object) -> list[dict[str, Any]]:
    lines = [
        line.removeprefix("data: ") for line in curl(path, {**body, "stream": True}).splitlines() if line[:5] == "data:"
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat() -> None:
    answer = ask("/v1/chat/completions", messages=MESSAGES, max_tokens=8)
    assert answer["choices"][0]["message"]["content"]


def stream() -> None:
    options = {"include_usage": True}
    chunks = events("/v1/chat/completions", messages=MESSAGES, max_tokens=8, stream_options=options)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"] <= 8) == ([], True)


def text() -> None:
    assert len(ask("/v1/completions", prompt=["x =", "y ="], max_tokens=4, n=2)["choices"]) == 4


def choices_and_logprobs() -> None:
    answer = ask("/v1/completions", prompt="x", max_tokens=4, n=2, logprobs=3)
    assert len(answer["choices"][1]["logprobs"]["tokens"]) == len(answer["choices"][1]["logprobs"]["token_logprobs"])


def best_of() -> None:
    answer = ask("/v1/completions", prompt="x", max_tokens=4, best_of=3, n=2, ignore_eos=True)
    assert (len(answer["choices"]), answer["usage"]["completion_tokens"]) == (2, 12)


def stop() -> None:
    whole = ask("/v1/completions", prompt="x", max_tokens=12, temperature=0)["choices"][0]["text"]
    cut = ask("/v1/completions", prompt="x", max_tokens=12, temperature=0, stop=whole[3:6])["choices"][0]["text"]
    assert cut == whole[: whole.index(whole[3:6])]


def json_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = ask("/v1/chat/completions", messages=MESSAGES, max_tokens=400, response_format=wanted)
    check_person(json.loads(answer["choices"][0]["message"]["content"]))


def records() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    answer = ask("/v1/chat/completions", messages=MESSAGES, max_tokens=200, response_format=wanted)
    assert set(json.loads(answer["choices"][0]["message"]["content"])) <= {"x", "y"}


def tool_call() -> None:
    answer = ask("/v1/chat/completions", messages=MESSAGES, max_tokens=400, tools=[TOOL], tool_choice="required")
    check_person(json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]))


def streamed_tool_call() -> None:
    body = {"messages": MESSAGES, "max_tokens": 400, "tools": [TOOL], "parallel_tool_calls": False}
    chunks = events("/v1/chat/completions", **body, tool_choice="required")
    calls = [
        call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []
    ]
    check_person(json.loads("".join(call["function"].get("arguments") or "" for call in calls)))


def embeddings() -> None:
    assert [row["index"] for row in ask("/v1/embeddings", input=["a", "b"])["data"]] == [0, 1]


def rerank() -> None:
    results = ask("/v1/rerank", query="a", documents=["a", "b", "c"], top_n=2)["results"]
    assert [results[0]["relevance_score"] >= results[1]["relevance_score"], len(results)] == [True, 2]


def models() -> None:
    assert MODEL in [model["id"] for model in json.loads(curl("/v1/models"))["data"]]


def errors() -> None:
    error = json.loads(curl("/v1/chat/completions", {"messages": MESSAGES, "temperature": 9}, 400))["error"]
    assert (set(error), error["param"]) == ({"message", "type", "param", "code"}, "temperature")


def response() -> None:
    first = ask("/v1/responses", input="hello", max_output_tokens=8)
    second = ask("/v1/responses", input="again", max_output_tokens=8, previous_response_id=first["id"])
    assert second["status"] in ("completed", "incomplete")


def messages() -> None:
    answer = ask("/v1/messages", messages=MESSAGES, max_tokens=8)
    assert (answer["type"], answer["content"][0]["type"]) == ("message", "text")


def streamed_messages() -> None:
    kinds = [event["type"] for event in events("/v1/messages", messages=MESSAGES, max_tokens=8)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def count_tokens() -> None:
    assert ask("/v1/messages/count_tokens", messages=MESSAGES)["input_tokens"] > 3


run(
    {
        "chat": chat,
        "stream with usage": stream,
        "text completion": text,
        "choices and logprobs": choices_and_logprobs,
        "best_of": best_of,
        "stop": stop,
        "JSON schema": json_schema,
        "records": records,
        "tool call": tool_call,
        "streamed tool call": streamed_tool_call,
        "embeddings": embeddings,
        "rerank": rerank,
        "models": models,
        "typed errors": errors,
        "Responses": response,
        "Messages": messages,
        "streamed Messages": streamed_messages,
        "token counting": count_tokens,
    }
)
