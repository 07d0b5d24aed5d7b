"""Lines of requests at the gateway: what stands in them, and what does not unless it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission.auth import Principal
from gateway.api.request_observer import MAX_PROMPT_CHARACTERS, RequestObserver
from gateway.api.schemas import parse_chat, parse_completion
from gateway.generation import Generation
from shared.request_log import RequestLog


class Lines(RequestLog):
    """Keeps what it is told to write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, message: str, fields: Any) -> None:
        self.lines.append(dict(fields()))


CHAT = b'{"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "secret"}]}'
TEXT = b'{"model": "m", "prompt": "' + b"x" * 2000 + b'secret", "max_tokens": 1}'
TOKENS = b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}'


def line(generation: Generation, *, logs_prompts: bool) -> dict[str, Any]:
    lines = Lines()
    observer = RequestObserver(lines, logs_prompts=logs_prompts)
    record = observer.begin("chat", "req_1", [(b"traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01")])
    record.parsed(Principal("key", "tenant"), generation)
    observer.end(record, 200)
    assert record.traceparent is None
    return lines.lines[0]


@pytest.mark.parametrize("generation", [parse_chat(CHAT), parse_completion(TEXT)], ids=["chat", "text"])
def test_prompt_stands_in_the_line_only_where_the_operator_wants_it(generation: Generation) -> None:
    without = line(generation, logs_prompts=False)
    assert "secret" not in repr(without)
    assert (without["tenant"], without["model"], without["outcome"]) == ("tenant", "m", "refused")
    prompt = line(generation, logs_prompts=True)["prompt"]
    assert prompt.endswith("secret")
    assert len(prompt) <= MAX_PROMPT_CHARACTERS


def test_prompt_of_token_ids_has_no_text() -> None:
    assert line(parse_completion(TOKENS), logs_prompts=True)["prompt"] is None
