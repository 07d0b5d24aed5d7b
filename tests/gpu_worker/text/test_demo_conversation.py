"""The demo model's own template with tools, against that of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ChatSettings, ModelTokenizer
from shared.conversation import ChatMessage, ChatOptions, ToolCall

TOOLS = [{"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object"}}}]
MESSAGES = (
    ChatMessage(role="user", content="2+3?"),
    ChatMessage(
        role="assistant",
        content="",
        tool_calls=(
            ToolCall(id="1", name="add", arguments='{"a": 2, "b": 3}'),
            ToolCall(id="2", name="add", arguments='{"a": 4}'),
        ),
    ),
    ChatMessage(role="tool", content="5", tool_call_id="1"),
)


def test_tool_history_is_rendered_as_transformers_does(demo_directory: ModelDirectory) -> None:
    reference: Any = PreTrainedTokenizerFast.from_pretrained(demo_directory.path)
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in MESSAGES[1].tool_calls
    ]
    plain = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "5"},
    ]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    expected = reference.apply_chat_template(plain, tools=TOOLS, **options)
    encoded = ModelTokenizer(demo_directory).encode_chat(MESSAGES, ChatOptions(tools=json.dumps(TOOLS)))
    assert encoded.token_ids == expected
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in reference.decode(expected)


def test_last_message_goes_on_where_the_client_ended_it(tokenizer: ModelTokenizer) -> None:
    answer = ChatMessage(role="assistant", content="def f(")
    token_ids = tokenizer.encode_chat([MESSAGES[0], answer], ChatOptions(continue_final_message=True)).token_ids
    assert tokenizer.decode(token_ids) == "2+3?def f("
    # Not closed by the token that ends a turn.
    assert token_ids[-1] != 0


@pytest.mark.parametrize(("setting", "name"), [("auto", "hermes"), ("plain", "plain"), ("harmony", "harmony")])
def test_format_is_that_of_the_template_unless_the_operator_knows_better(
    demo_directory: ModelDirectory, setting: str, name: str
) -> None:
    assert ModelTokenizer(demo_directory, ChatSettings(setting)).chat_format == name


def test_prompt_that_opens_the_reasoning_says_so(demo_directory: ModelDirectory) -> None:
    settings = ChatSettings("auto", allows_templates=True)
    tokenizer = ModelTokenizer(demo_directory, settings)
    thinking = (
        "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}>{% if enable_thinking is not defined %}<think>\n"
        "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )

    def starts_inside(message: ChatMessage, **options: Any) -> bool:
        return tokenizer.encode_chat([message], ChatOptions(template=thinking, **options)).in_reasoning

    user = ChatMessage(role="user", content="x")
    assert starts_inside(user)
    assert not starts_inside(user, variables='{"enable_thinking": false}')
    assert not starts_inside(user, add_generation_prompt=False)
    assert not starts_inside(ChatMessage(role="user", content="<think>"), variables='{"enable_thinking": false}')
    assert starts_inside(ChatMessage(role="assistant", content="<think>so"), continue_final_message=True)
    thought = ChatMessage(role="assistant", content="", reasoning="so")
    assert starts_inside(thought, continue_final_message=True)
