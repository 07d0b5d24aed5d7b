"""A request that is asked again as its timeline tells of it is the same request, or what is missing is named."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api.request_observer import RequestRecord
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.generation import Generation
from gateway.timelines.view import view_of
from shared.timeline import Timeline

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
    {"temperature": 0, "best_of": 3, "n": 2},
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
