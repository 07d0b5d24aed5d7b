"""Generations of one short prompt with the fields of a test, as such and as the bodies of each API become them."""

from __future__ import annotations

import json
from typing import Any

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas.names import BodyRules
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.generation import Generation, Kind, Prompt
from gateway.responses.draft import ResponseGeneration
from gateway.responses.request import own_items, parse_body, to_generation
from shared.conversation import ChatMessage
from shared.sampling import Sampling

USER = {"role": "user", "content": "x"}
PROMPT = Prompt(1, text="x")


def generation(kind: Kind = "chat", prompt: Prompt = PROMPT, n: int = 1, **fields: Any) -> Generation:
    return Generation(kind, "m", (prompt,), n, **{"sampling": Sampling(), "deterministic": False, **fields})


def chat(messages: Any = (USER,), **fields: Any) -> Generation:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def completion(prompt: Any = "x", **fields: Any) -> Generation:
    return parse_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def message(messages: Any = (USER,), **fields: Any) -> Generation:
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode())


def response(items: Any = "x", *, allow_unknown: bool = False, **fields: Any) -> ResponseGeneration:
    body = json.dumps({"model": "m", "input": items, **fields}).encode()
    return response_of(body, BodyRules(allow_unknown=allow_unknown))


def response_of(body: bytes, rules: BodyRules = BodyRules()) -> ResponseGeneration:  # noqa: B008
    request = parse_body(body, rules)
    return to_generation(request, [], own_items(request), ())


def messages_of(generation: Generation) -> tuple[ChatMessage, ...]:
    messages = generation.prompts[0].messages
    assert messages is not None
    return messages
