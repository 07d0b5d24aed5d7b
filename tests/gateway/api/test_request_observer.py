"""Lines of requests at the gateway: what stands in them, and what does not unless it is asked for."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.api import request_observer
from gateway.api.request_observer import MAX_PROMPT_CHARACTERS, RequestObserver, RequestRecord
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.usage import UsageTotals
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.timelines.view import view_of
from shared.messages import Usage
from shared.request_log import SLOW_S, SLOW_TTFT_S, RequestLog
from shared.timeline import Timeline
from shared.tracing import Attributes


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
    record.tenant, record.generation = "tenant", generation
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


PARENT = b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01"
BODY = b'{"model": "m", "prompt": "x", "n": 2, "max_tokens": 9, "temperature": 0.5, "top_p": 0.25}'


class Spans:
    """Keeps spans instead of sending them."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str | None]] = []
        self.added: list[tuple[str, str, float, float, Attributes]] = []
        self.ended: list[tuple[object, str, Attributes, str | None]] = []

    def begin(self, name: str, parent: str | None) -> object:
        self.begun.append((name, parent))
        return self

    def add(self, name: str, parent: str, began: float, ended: float, attributes: Attributes) -> None:
        self.added.append((name, parent, began, ended, attributes))

    def end(self, span: object, name: str, attributes: Attributes, error: str | None) -> None:
        self.ended.append((span, name, attributes, error))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.setattr(request_observer, "traceparent", lambda span: "00-own")
    return Spans()


def test_span_of_a_complete_answer_says_what_was_asked_and_what_it_took(spans: Spans) -> None:
    lines = Lines()
    observer = RequestObserver(lines, cast("Any", spans))
    record = observer.begin("completion", "req_1", [(b"host", b"t"), (b"traceparent", PARENT)])
    assert spans.begun == [("completion", PARENT.decode())]
    assert record.traceparent == "00-own"
    record.tenant, record.generation = "tenant", parse_completion(BODY)
    record.dispatched_at, record.first_token_at = record.began_at + 1.0, record.began_at + 3.0
    record.outcome, record.usage = "completed", UsageTotals(2)
    record.usage.add(0, Usage(5, 3, 4))
    observer.end(record, 200)
    ((span, name, attributes, error),) = spans.ended
    assert (span, name, error) == (spans, "text_completion m", None)
    assert attributes == {
        "http.response.status_code": 200,
        "http.route": "completion",
        "gen_ai.provider.name": "headrace",
        "headrace.request_id": "req_1",
        "headrace.tenant": "tenant",
        "headrace.outcome": "completed",
        "headrace.time_to_first_token_s": 3.0,
        "error.type": None,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
    }
    assert spans.added == [("admission", "00-own", record.began_at, record.began_at + 1.0, {})]
    (line,) = lines.lines
    assert line.pop("total_s") >= 0.0
    assert line == {
        "request_id": "req_1",
        "route": "completion",
        "status": 200,
        "outcome": "completed",
        "error": None,
        "tenant": "tenant",
        "model": "m",
        "n": 2,
        "stream": False,
        "prompt_tokens": 5,
        "cached_tokens": 4,
        "completion_tokens": 3,
        "admission_s": 1.0,
        "ttft_s": 3.0,
    }


@pytest.mark.parametrize(
    ("status", "code", "kind", "told"),
    [
        (503, "no_worker", "no_worker", "No."),
        (500, None, "500", "No."),
        (404, "model_not_found", "model_not_found", None),
    ],
)
def test_error_is_named_and_only_a_fault_of_ours_makes_the_span_one(
    spans: Spans, status: int, code: str | None, kind: str, told: str | None
) -> None:
    observer = RequestObserver(Lines(), cast("Any", spans))
    record = observer.begin("chat", "req_1", [])
    record.failed(ApiError(status, "No.", code=code))
    observer.end(record, status)
    ((_, name, attributes, error),) = spans.ended
    assert (name, attributes["error.type"], error) == ("chat", kind, told)
    assert attributes["headrace.outcome"] == "refused"
    assert spans.added == []


@pytest.mark.parametrize("headers", [[], [(b"traceparent", PARENT)] * 2])
def test_parent_counts_where_there_is_exactly_one(spans: Spans, headers: list[tuple[bytes, bytes]]) -> None:
    RequestObserver(Lines(), cast("Any", spans)).begin("chat", "req_1", headers)
    assert spans.begun == [("chat", None)]


PARSE: dict[str, Callable[[bytes], Generation]] = {"chat": parse_chat, "completion": parse_completion}
PROMPT: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "completion": {"prompt": "hello"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def kept(route: str, body: dict[str, Any], *, keeps_texts: bool = True) -> tuple[Generation, Timeline]:
    generation = PARSE[route](json.dumps({"model": "m"} | PROMPT[route] | body).encode())
    record = RequestRecord(route, "r")
    record.tenant, record.generation = "t", generation
    record.end(200, keeps_texts=keeps_texts)
    assert "secret" not in repr(record.generation)
    return generation, record.timeline("gw")


def test_wall_clock_that_is_set_moves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    record = RequestRecord("chat", "r")
    began = record.timeline("gw").began
    monkeypatch.setattr(time, "time", lambda: began + 3600.0)
    assert record.timeline("gw").began == began


def asked_again(route: str, timeline: Timeline) -> Generation:
    curl = view_of(timeline, None).curl
    assert curl is not None
    words = shlex.split(curl)
    return PARSE[route](words[words.index("-d") + 1].encode())


BOTH: list[dict[str, Any]] = [
    {"seed": 7, "stop": ["zzz", "y"], "top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.8, "max_tokens": 9},
    {"temperature": 0, "n": 2, "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.2},
    {"seed": 7, "ignore_eos": True, "min_tokens": 3, "max_tokens": 5, "timeout": 30, "priority": 2},
    {"seed": 7, "skip_special_tokens": False, "include_stop_str_in_output": True, "stop": "x"},
    {"seed": 0},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"seed": 7, "logprobs": 3},
    {"seed": 7, "echo": True, "logprobs": 2},
    {"seed": 7, "best_of": 3, "n": 2},
    {"seed": 7, "best_of": 3, "n": 2, "logprobs": 1},
]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        *(("chat", body) for body in [*BOTH, {"seed": 7, "logprobs": True, "top_logprobs": 3}]),
        *(("completion", body) for body in [*BOTH, *COMPLETIONS]),
    ],
)
def test_request_is_asked_again_with_all_its_parameters(route: str, body: dict[str, Any]) -> None:
    first, timeline = kept(route, body)
    assert timeline.not_kept == ()
    assert asked_again(route, timeline) == first


def test_what_the_client_left_to_the_model_and_to_chance_is_left_to_them_again() -> None:
    first, timeline = kept("chat", {})
    again = asked_again("chat", timeline)
    assert again.left_out == first.left_out
    assert not again.deterministic
    same_seed = replace(again.sampling, seed=first.sampling.seed)
    assert replace(again, sampling=same_seed) == first


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("chat", {"tools": [TOOL], "tool_choice": "auto"}, ("tools",)),
        ("chat", {"response_format": {"type": "json_object"}}, ("response_format",)),
        ("chat", {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, ("messages",)),
        ("chat", {"messages": [{"role": "user", "content": "u" * 501}]}, ("messages",)),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, ("chat_template_kwargs", "reasoning_effort")),
        ("completion", {"prompt": ["a", "b"]}, ("prompt",)),
        ("completion", {"prompt": [1, 2]}, ("prompt",)),
        ("completion", {"suffix": "x"}, ("suffix",)),
        ("completion", {"logit_bias": {"5": 1}, "stop_token_ids": [3]}, ("logit_bias", "stop_token_ids")),
    ],
)
def test_what_is_not_kept_is_named(route: str, body: dict[str, Any], named: tuple[str, ...]) -> None:
    assert kept(route, body)[1].not_kept == named


def test_texts_are_kept_only_where_the_operator_shows_them() -> None:
    timeline = kept("completion", {"stop": ["secret"], "prompt": "secret too"}, keeps_texts=False)[1]
    assert "secret" not in repr(timeline)
    assert timeline.not_kept == ("stop",)
