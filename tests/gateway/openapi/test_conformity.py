"""What the gateway answers to bodies made from its own description is what the description says.

The bodies come from the schemas by a fixed seed. None may make the gateway fail, and each answer keeps to its schema.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx2
import jsonschema
import pytest

from gateway.openapi.document import document
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker
from tests.gateway.shared_gateway import gateway, nats_url

__all__ = ["gateway", "nats_url"]

TEXTS = ["", "a", "hello", "é\u4e2d", "\U0001f600", "<|end|>", '{"a": 1}', "\0", "x" * 300]
ANYTHING = [None, True, 0, -1, 2**63, 1e308, 0.5, "a", [], [1], {}, {"type": "object"}, {"type": "text"}]
# Numbers at random are seldom near these, where mistakes are.
NUMBERS = [0, 1, -1, 2, 5, 20, 0.5]


class Bodies:
    """Makes values of schemas of one document. Optional fields are in about one of ten."""

    def __init__(self, components: dict[str, Any], seed: int) -> None:
        self._components = components
        self._random = random.Random(seed)

    def body(self, schema: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = self._value(schema)
        if self._random.random() < 0.3:
            name = self._random.choice([*self._resolved(schema)["properties"], "no_such_name"])
            body[name] = self._random.choice(ANYTHING)
        return body

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        return schema

    def _value(self, schema: dict[str, Any]) -> Any:
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._value(self._random.choice(schema["anyOf"]))
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            size = self._random.choice([schema.get("minItems", 0), 1, 2])
            return [self._value(schema.get("items", {})) for _ in range(max(size, schema.get("minItems", 0)))]
        if kind in ("integer", "number"):
            return self._number(schema)
        if kind == "string":
            return self._random.choice(TEXTS)
        if kind == "boolean":
            return self._random.random() < 0.5
        return None if kind == "null" else self._random.choice(ANYTHING)

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required = schema.get("required", [])
        fields = {
            name: self._value(field)
            for name, field in schema.get("properties", {}).items()
            if name in required or self._random.random() < 0.1
        }
        values = schema.get("additionalProperties")
        if isinstance(values, dict) and self._random.random() < 0.5:
            fields[str(self._random.randrange(300))] = self._value(values)
        return fields

    def _number(self, schema: dict[str, Any]) -> int | float:
        low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
        number: int | float = self._random.choice([*NUMBERS, low, high, self._random.uniform(low, high)])
        number = min(max(number, low), high)
        return int(number) if schema["type"] == "integer" else number


DOCUMENT = document()
COMPONENTS = DOCUMENT["components"]["schemas"]
# Left to chance, few requests would be answered at all: every second one has a prompt that is right.
PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "previous_response_id": None, "background": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": ["hi", "there"]},
    "/v1/rerank": {"query": "hi", "documents": ["there", {"text": "hi"}]},
    "/v1/score": {"text_1": "hi", "text_2": ["there", "hi"]},
}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that can be read alone: its references lead into itself."""
    text = json.dumps(schema | {"$defs": COMPONENTS}).replace("#/components/schemas/", "#/$defs/")
    found: dict[str, Any] = json.loads(text)
    return found


def bodies(path: str, count: int) -> list[dict[str, Any]]:
    """Return bodies made from the schema of a path, always the same."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    made = Bodies(COMPONENTS, seed=7)
    return [made.body(schema) for _ in range(count)]


def data_of(stream: str) -> list[Any]:
    """Return the data of all events."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check(path: str, answer: httpx2.Response) -> bool:
    """Compare an answer with its schema; return whether it was a success."""
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    error = jsonschema.Draft202012Validator(closed(responses["default"]["content"]["application/json"]["schema"]))
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code != 200:
        error.validate(answer.json())
        return False
    kind = answer.headers["content-type"].partition(";")[0]
    validator = jsonschema.Draft202012Validator(closed(responses["200"]["content"][kind]["schema"]))
    for item in data_of(answer.text) if kind == "text/event-stream" else [answer.json()]:
        (error if "error" in item and kind == "text/event-stream" else validator).validate(item)
    return True


async def ask_all(gateway: GatewayProcess, nats_url: str, path: str, count: int) -> int:
    """Ask with all bodies, and return how many were answered with success."""
    num_answered = 0
    limits = httpx2.Limits(max_connections=16)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with known_worker(nats_url, gateway) as worker:
        serving = asyncio.create_task(worker.serve())
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=30) as http:

            async def ask(number: int, body: dict[str, Any]) -> bool:
                body["model"] = worker.model
                if number % 2:
                    body |= PROMPTS[path]
                for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
                    if isinstance(body.get(name), int):
                        body[name] %= 20
                if "timeout" in body:
                    body["timeout"] = 5
                return check(path, await http.post(gateway.url + path, json=body))

            made = list(enumerate(bodies(path, count)))
            for start in range(0, len(made), 64):
                num_answered += sum(await asyncio.gather(*(ask(*each) for each in made[start : start + 64])))
        serving.cancel()
    assert "Traceback" not in gateway.log
    return num_answered


PATHS = list(PROMPTS)


@pytest.mark.parametrize("path", PATHS)
async def test_answers_keep_to_the_description(gateway: GatewayProcess, nats_url: str, path: str) -> None:
    assert await ask_all(gateway, nats_url, path, 25) > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
async def test_many_answers_keep_to_the_description(gateway: GatewayProcess, nats_url: str, path: str) -> None:
    assert await ask_all(gateway, nats_url, path, 750) > 40
