"""The bound of a prompt's tokens, against what real templates and tokenizers make of prompts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch.claimed_usage import believable, most_prompt_tokens
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.stack.config import DEMO_MODEL
from shared.conversation import ChatMessage, ChatOptions
from shared.messages import Delta, Finish, Request, Usage

# Characters of one to four bytes, one that NFKC makes eighteen of, half a pair's neighbours.
TEXT = st.text(st.sampled_from("a \n{<|é€\ufdfa😀\u200b"), max_size=60)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(read_model_directory(DEMO_MODEL))


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_text_has_no_more_tokens_than_the_bound(text: str, tokenizer: ModelTokenizer) -> None:
    assert len(tokenizer.encode_text(text or "a")) <= most_prompt_tokens(Request(id="a", model="m", text=text))


@settings(max_examples=30, deadline=None)
@given(contents=st.lists(TEXT, min_size=1, max_size=5), with_tools=st.booleans())
def test_conversation_has_no_more_tokens_than_the_bound(
    contents: list[str], with_tools: bool, tokenizer: ModelTokenizer
) -> None:
    messages = tuple(ChatMessage(role="user", content=content) for content in contents)
    options = ChatOptions(tools=json.dumps([TOOL]) if with_tools else None)
    request = Request(id="a", model="m", messages=messages, chat=options)
    assert len(tokenizer.encode_chat(messages, options).token_ids) <= most_prompt_tokens(request)


def test_token_ids_are_as_many_as_were_sent() -> None:
    assert most_prompt_tokens(Request(id="a", model="m", token_ids=(1, 2, 3))) == 3
    # Of an empty prompt the worker makes one that begins a text.
    assert most_prompt_tokens(Request(id="a", model="m", token_ids=())) == 1


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 50))
def test_what_can_be_true_stays_and_nothing_is_beyond_it(prompt: int, cached: int, drafts: int, emitted: int) -> None:
    request = Request(id="a", model="m", text="x" * 100)
    most = most_prompt_tokens(request)
    claimed = Usage(prompt, emitted, cached, drafts, drafts)
    delta = Delta("a", 0, emitted, finish=Finish("stop", claimed), prompt_tokens=prompt)
    told = believable(delta, request, 29, emitted)
    assert told.finish is not None
    assert told.finish.usage is not None
    usage = told.finish.usage
    assert told.prompt_tokens == usage.prompt_tokens == min(prompt, most)
    assert usage.cached_tokens <= usage.prompt_tokens
    assert usage.accepted_prediction_tokens <= emitted
    if prompt <= most and cached <= prompt and drafts <= emitted:
        assert told is delta
