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
from tests.gateway.parsed_bodies import response_of
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
