"""What several APIs can serve is served by each of them, under the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.anthropic.parsing import parse_messages
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.pooling.parsing import parse_embeddings, parse_rerank, parse_score
from tests.gateway.parsed_bodies import chat, message, response, response_of
from tests.gateway.refusals import refused

Parse = Callable[[bytes], Generation]
END_USER = {"user": {"id": "7", "name": "Ann"}}


MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
CHAT = (parse_chat, {"model": "m", **MESSAGES})
COMPLETION = (parse_completion, {"model": "m", "prompt": "x"})
RESPONSE = (response_of, {"model": "m", "input": "x"})
MESSAGE = (parse_messages, {"model": "m", "max_tokens": 5, **MESSAGES})
POOLED = (
    (parse_embeddings, {"model": "m", "input": "x"}),
    (parse_rerank, {"model": "m", "query": "x", "documents": ["y"]}),
    (parse_score, {"model": "m", "text_1": "x", "text_2": "y"}),
)


@pytest.mark.parametrize(("parse", "body"), [CHAT, RESPONSE, MESSAGE])
def test_variables_of_the_template_reach_it(parse: Parse, body: dict[str, Any]) -> None:
    chat = parse(msgspec.json.encode(body | {"chat_template_kwargs": {"tone": "dry"}})).prompts[0].chat
    assert chat is not None
    assert msgspec.json.decode(chat.variables or "") == {"tone": "dry"}


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (CHAT[0], CHAT[1] | {"logprobs": True}),
        (COMPLETION[0], COMPLETION[1] | {"logprobs": 0}),
        (RESPONSE[0], RESPONSE[1] | {"include": ["message.output_text.logprobs"]}),
    ],
)
def test_listed_tokens_are_reported_beside_log_probabilities(parse: Parse, body: dict[str, Any]) -> None:
    listed = {"logprob_token_ids": [5, 7, 5]}
    assert parse(msgspec.json.encode(body | listed)).sampling.logprob_token_ids == (5, 7)
    alone = {name: value for name, value in body.items() if name not in ("logprobs", "include")}
    assert refused(parse, msgspec.json.encode(alone | listed)).param == "logprob_token_ids"


def test_message_has_no_log_probabilities_and_says_who_has() -> None:
    with pytest.raises(ApiError, match="belongs to POST /v1/chat/completions") as caught:
        parse_messages(msgspec.json.encode(MESSAGE[1] | {"logprob_token_ids": [5]}))
    assert (caught.value.status, caught.value.param) == (400, "logprob_token_ids")


@pytest.mark.parametrize(("parse", "body"), [CHAT, COMPLETION, RESPONSE, *POOLED])
def test_end_user_may_be_an_object(parse: Parse, body: dict[str, Any]) -> None:
    plain, named = parse(msgspec.json.encode(body)), parse(msgspec.json.encode(body | END_USER))
    assert (named.prompts, named.pooling) == (plain.prompts, plain.pooling)
    assert refused(parse, msgspec.json.encode(body | {"user": ["Ann"]})).param == "user"


def test_stop_that_is_empty_ends_nothing() -> None:
    for (parse, body), stop in (
        (CHAT, {"stop": ""}),
        (COMPLETION, {"stop": [""]}),
        (RESPONSE, {"stop": [""]}),
        (MESSAGE, {"stop_sequences": [""]}),
    ):
        assert parse(msgspec.json.encode(body | stop)).sampling.stop == ()


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": _SCHEMA}
_ANTHROPIC_TOOL = {"name": "f", "input_schema": _SCHEMA}


def told(ask: Callable[..., Generation], **fields: Any) -> str:
    return refused(ask, **fields).message


def test_tool_of_another_api_is_told_its_form_here() -> None:
    assert told(response, tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told(message, tools=[_CHAT_TOOL]).endswith("Write its fields into the tool itself.")
    assert told(message, tools=[_RESPONSES_TOOL]).endswith("Name it 'input_schema'.")
    assert "Put it into `function`" in told(chat, tools=[_ANTHROPIC_TOOL])


def test_choice_of_another_api_is_told_its_form_here() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert told(chat, tools=[_CHAT_TOOL], tool_choice={"type": "function", "name": "f"}).endswith(
        "Write it into 'tool_choice.function'."
    )
    assert "'tool_choice.name'" in told(response, tools=[_RESPONSES_TOOL], tool_choice=named)
    assert "must be a text" in told(response, tools=[_RESPONSES_TOOL], tool_choice={"type": "any"})
    assert told(message, tools=[_ANTHROPIC_TOOL], tool_choice=named) == (
        "'tool_choice.type' must be one of auto, any, tool, none."
    )


def test_schema_in_another_place_is_told_its_own() -> None:
    bare = {"type": "json_schema", "json_schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told(chat, response_format=bare)
    flat = {"type": "json_schema", "schema": _SCHEMA}
    assert "'response_format.json_schema.schema'" in told(chat, response_format=flat)
    assert "'response_format.json_schema.schema'" in told(chat, response_format=_SCHEMA)


def test_unknown_names_are_told_what_to_do() -> None:
    assert "into the body itself" in told(chat, extra_body={"top_k": 1})
    assert "--allow-unknown-parameters" in told(chat, ttl=5)
    assert told(message, messages=[{"role": "USER", "content": "x"}]) == (
        "'messages.[0].role' must be one of user, assistant, system."
    )


def test_missing_model_is_told_where_models_are_listed() -> None:
    assert "GET /v1/models" in told(chat, model=None)
