"""Names of answers, of their formats, and of the calls in them."""

from __future__ import annotations

import re
import time

import pytest

from gateway.api.choice_fields import call_fields, finish_reason, new_call_id, reasoning_fields
from gateway.api.chunks import AnswerIdentity
from gateway.generation import Generation, Kind, Prompt
from shared.sampling import Sampling


@pytest.mark.parametrize(
    ("kind", "prefix", "whole", "streamed"),
    [
        ("chat", "chatcmpl-", "chat.completion", "chat.completion.chunk"),
        ("completion", "cmpl-", "text_completion", "text_completion"),
    ],
)
def test_answer_is_named_as_its_clients_know_it(kind: Kind, prefix: str, whole: str, streamed: str) -> None:
    generation = Generation(kind, "m", (Prompt(1, text="x"),), 1, Sampling(), deterministic=False)
    identity, other = (AnswerIdentity.new(generation, "fp_1") for _ in range(2))
    assert re.fullmatch(prefix + "[0-9a-f]{24}", identity.id)
    assert identity.id != other.id
    assert abs(identity.created - time.time()) < 5
    assert identity.fields(streamed=False) == {
        "id": identity.id,
        "object": whole,
        "created": identity.created,
        "model": "m",
        "system_fingerprint": "fp_1",
    }
    assert identity.fields(streamed=True)["object"] == streamed
    assert AnswerIdentity.new(generation).fields(streamed=True)["system_fingerprint"] is None


def test_call_has_an_id_of_its_own_and_its_parts() -> None:
    call_id = new_call_id()
    assert re.fullmatch("call_[0-9a-f]{24}", call_id)
    assert new_call_id() != call_id
    assert call_fields("call_1", "f", "{}") == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    assert reasoning_fields("r") == {"reasoning_content": "r", "reasoning": "r"}


@pytest.mark.parametrize(
    ("reason", "num_calls", "is_function_call", "told"),
    [
        ("stop", 0, False, "stop"),
        ("stop", 1, False, "tool_calls"),
        ("stop", 2, True, "function_call"),
        ("length", 1, False, "length"),
        ("length", 0, True, "length"),
    ],
)
def test_text_that_ended_by_itself_with_calls_ended_for_them(
    reason: str, num_calls: int, is_function_call: bool, told: str
) -> None:
    assert finish_reason(reason, num_calls, is_function_call) == told
