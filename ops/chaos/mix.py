"""The requests of a load: a fixed set of bodies that differ in everything that recovery must carry over.

Each body is run once undisturbed; its answer is what every later run of the same body must repeat.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from ops.chaos.system import MODEL

_WORDS = ("def", "return", "list", "path", "open", "value", "index", "count", "name", "result", "file", "line")


@dataclass(frozen=True)
class Body:
    """A request's path and JSON, and how its client behaves.

    Attributes:
        abort_after: Pieces of output after which the client leaves, 0 for some milliseconds after its request; None
            stays to the end.
        is_reading: Whether the client reads its answer at all.
    """

    path: str
    json: dict[str, Any]
    abort_after: int | None = None
    is_reading: bool = True

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.json.get("stream"))


def mixed_bodies(num_tokens: int, num_bodies: int = 16, seed: int = 7) -> list[Body]:
    """Return bodies of all kinds, `num_tokens` long in the mean: plain ones most often."""
    chance = random.Random(seed)
    return [_body(index, num_tokens, chance) for index in range(num_bodies)]


def plain_bodies(num_tokens: int, num_bodies: int, prompt_words: int = 8) -> list[Body]:
    """Return streams of one choice with exactly `num_tokens` tokens."""
    chance = random.Random(num_tokens)
    return [_completion(_prompt(chance, prompt_words), index, num_tokens) for index in range(num_bodies)]


def constrained_bodies(num_tokens: int) -> list[Body]:
    """Return bodies whose recovery carries over more than tokens: grammars, tool calls, the best of several, echoes."""
    chat = {name: value for name, value in _completion("", 3, num_tokens).json.items() if name != "prompt"}
    chat |= {"messages": [{"role": "user", "content": "Count the files."}], "temperature": 0.8}
    plain = _completion("count = ", 5, num_tokens).json
    whole = {name: value for name, value in plain.items() if not name.startswith("stream")}
    schema = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 500}
    arguments = {"type": "object", "properties": {"words": schema}, "required": ["words"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": arguments}}
    kind = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    return [
        Body("/v1/chat/completions", chat | {"response_format": kind}),
        Body("/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}),
        Body("/v1/completions", plain | {"guided_regex": "([a-f]+-[0-9]+ ){400}", "temperature": 1.0}),
        Body("/v1/completions", whole | {"n": 2, "best_of": 4, "temperature": 1.0}),
        Body("/v1/completions", plain | {"echo": True, "logprobs": 1, "n": 2}),
        Body("/v1/completions", whole | {"prompt": ["one", "two", "three"], "temperature": 0.5}),
    ]


def _body(index: int, num_tokens: int, chance: random.Random) -> Body:
    length = chance.randint(num_tokens // 2, num_tokens * 3 // 2)
    body = _completion(_prompt(chance, chance.choice((4, 12, 60))), index, length)
    fields = dict(body.json)
    match index % 8:
        case 1:
            fields |= {"n": 2, "temperature": 0.9, "top_p": 0.9}
        case 2:
            fields |= {"logprobs": 2}
        case 3:
            fields |= {"stop": ["ret", "\n\n\n", "zz"], "temperature": 1.0}
        case 4:
            fields = {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}
            fields |= {"temperature": 0.8, "frequency_penalty": 0.4}
        case 5:
            messages = [{"role": "user", "content": fields.pop("prompt")}]
            return Body("/v1/chat/completions", fields | {"messages": messages, "logprobs": True, "top_logprobs": 1})
        case 6:
            fields |= {"n": 2, "logprobs": 1, "temperature": 1.2, "top_k": 40}
        case 7:
            fields |= {"temperature": 0.7, "repetition_penalty": 1.2}
    return Body(body.path, fields)


def _completion(prompt: str, seed: int, num_tokens: int) -> Body:
    fields = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Body("/v1/completions", fields)


def _prompt(chance: random.Random, num_words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=num_words))
