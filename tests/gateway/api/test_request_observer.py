"""Lines of requests at the gateway: what stands in them, and what does not unless it is asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.admission.auth import Principal
from gateway.api.request_observer import MAX_PROMPT_CHARACTERS, RequestObserver
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.generation import Generation
from shared.request_log import SLOW_S, SLOW_TTFT_S, RequestLog


class Lines(RequestLog):
    """Keeps what it is told to write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.kinds: list[str] = []

    def write(self, message: str, fields: Any, kind: Any = "request") -> None:
        self.kinds.append(kind)
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


@pytest.mark.parametrize(
    ("status", "ttft_s", "held_s", "kind"),
    [
        (200, 0.1, 1.0, "request"),
        (200, SLOW_TTFT_S, 10.0, "problem"),
        (200, 0.1, SLOW_S, "problem"),
        (429, None, 0.0, "problem"),
        (500, 0.1, 1.0, "problem"),
    ],
)
def test_failed_refused_and_slow_requests_have_lines_of_their_own(
    status: int, ttft_s: float | None, held_s: float, kind: str
) -> None:
    lines = Lines()
    observer = RequestObserver(lines, logs_prompts=False)
    record = observer.begin("chat", "req_1", [])
    record.began_at = time.monotonic() - held_s
    record.first_token_at = None if ttft_s is None else record.began_at + ttft_s
    observer.end(record, status)
    assert lines.kinds == [kind]
