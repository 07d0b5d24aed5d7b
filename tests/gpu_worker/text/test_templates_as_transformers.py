"""Conversations of every kind, from the body of a chat to the text of its prompt, against `apply_chat_template`.

The templates here are written in the manner of families, or stand in installed packages. `CHAT_TEMPLATES=<folder>` adds
those of a folder, such as llama.cpp's `models/templates`.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

import ops
from gateway.api.schemas.parsing import parse_chat
from gpu_worker.text.chat_template import ChatTemplate, conversation_text
from gpu_worker.text.spelled_tokens import SpelledTokens
from shared.conversation import ChatOptions, Conversation
from shared.errors import BadRequestError
from tests.gpu_worker.text.test_conversation_text import (
    DEEPSEEK_R1,
    GEMMA,
    GEMMA4,
    GRANITE4,
    LLAVA,
    MINISTRAL,
    QWEN2_VL,
    QWEN3,
)

DEMO = Path(ops.__file__).parent / "demo_model" / "model" / "tokenizer_config.json"
CALLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content if m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{{ m.name }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FOLDER = os.environ.get("CHAT_TEMPLATES")
TEMPLATES = {
    "calls": CALLS,
    "deepseek": DEEPSEEK_R1,
    "demo": json.loads(DEMO.read_text())["chat_template"],
    "gemma": GEMMA,
    "gemma4": GEMMA4,
    "granite4": GRANITE4,
    "llava": LLAVA,
    "ministral": MINISTRAL,
    "qwen2-vl": QWEN2_VL,
    "qwen3": QWEN3,
    "smolvlm": DEFAULT_CHAT_TEMPLATE,
    **{path.stem: path.read_text() for path in sorted(Path(FOLDER).glob("*.jinja") if FOLDER else ())},
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

Message = dict[str, Any]


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(number: int, content: Any = "3") -> Message:
    return said("tool", content, tool_call_id=f"abcdefgh{number}", name="add")


SYSTEM, USER, ANSWER = said("system", "Be brief."), said("user", 'Add 1 <b>and</b> "2" é'), said("assistant", "Three.")
THOUGHT = said("assistant", None, reasoning="Hm.", reasoning_content="Hm.")
ONE = [call(1, {"a": 1, "b": "é<"})]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
CONVERSATIONS: dict[str, list[Message]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "empty answer": [USER, said("assistant", ""), USER],
    "reasoning": [USER, {**THOUGHT, "content": "Three."}, USER],
    "call without content": [USER, {"role": "assistant", "tool_calls": ONE}, result(1)],
    "call with null": [USER, said("assistant", None, tool_calls=ONE), result(1)],
    "call with a text": [USER, said("assistant", "I add.", tool_calls=ONE), result(1)],
    "call without arguments": [USER, said("assistant", None, tool_calls=[call(1, {})]), result(1)],
    "call with reasoning": [
        USER,
        said("assistant", None, reasoning="Hm.", reasoning_content="Hm.", tool_calls=ONE),
        result(1),
    ],
    "two calls": [USER, said("assistant", None, tool_calls=[*ONE, call(2, {"a": 2})]), result(1), result(2, "4")],
    "two rounds": [SYSTEM, USER, said("assistant", None, tool_calls=ONE), result(1), ANSWER, USER],
    "parts": [said("user", parts("first ", " second"))],
    "parts of all": [
        said("system", parts("third", "fourth")),
        USER,
        said("assistant", parts(" fifth", "sixth ")),
        said("user", parts("seventh")),
    ],
    "parts of a result": [USER, said("assistant", None, tool_calls=ONE), result(1, parts("eighth", "ninth"))],
}


def ours(template: ChatTemplate, messages: list[Message], tools: list[Any] | None) -> str:
    """Return the prompt's text of a body, as clients write it."""
    written = copy.deepcopy(messages)
    for each in (each for message in written for each in message.get("tool_calls") or ()):
        each["function"]["arguments"] = json.dumps(each["function"]["arguments"], ensure_ascii=False)
    body = {"model": "m", "messages": written, **({"tools": tools} if tools else {})}
    [prompt] = parse_chat(json.dumps(body).encode()).prompts
    options = msgspec.structs.replace(prompt.chat or ChatOptions(), tools=json.dumps(tools) if tools else None)
    shield = SpelledTokens(SPECIAL.values()).shield()
    assert prompt.messages is not None
    return conversation_text(template, Conversation(prompt.messages, options), shield).replace(shield.mark, "")


def shows_parts_ill(prompt: str, messages: list[Message]) -> bool:
    """Return whether a template that knows no lists has written one as it is, or lost a text: ours are joined then."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    texts = [part["text"].strip() for content in lists for part in content]
    is_written = any(form in prompt for form in ("'type': 'text'", '"type": "text"'))
    return bool(lists) and (is_written or not all(text in prompt for text in texts))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_prompt_is_that_of_transformers(name: str, kind: str) -> None:
    messages, source = CONVERSATIONS[kind], TEMPLATES[name]
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    if tools and "tool" not in source:
        return
    template = ChatTemplate(source, SPECIAL)
    library = Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **SPECIAL)
    options = {"tools": copy.deepcopy(tools), "tokenize": False, "add_generation_prompt": True}
    given = copy.deepcopy(messages)
    for message in given if template.needs.has_parts else ():
        # Such templates read nothing else, and clients send texts too.
        if not isinstance(message.get("content"), list):
            message["content"] = parts(message.get("content") or "")
    try:
        expected = oracle.apply_chat_template(given, **options)
    except (TemplateError, TypeError, ValueError):
        # What the library's form of a message makes a template refuse, ours may not.
        return
    shown = ours(template, messages, tools)
    if shows_parts_ill(expected, messages):
        assert not shows_parts_ill(shown, messages)
    else:
        assert shown == expected


@pytest.mark.parametrize("variables", [{"bos_token": ""}, {"eos_token": "|", "bos_token": None}, {"greeting": "Hi"}])
def test_variables_take_the_place_of_special_tokens(variables: dict[str, Any]) -> None:
    source = (
        "{{ bos_token }}{{ greeting }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ pad_token }}"
    )
    library = Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **SPECIAL)
    body = {"model": "m", "messages": [USER, ANSWER], "chat_template_kwargs": variables}
    [prompt] = parse_chat(json.dumps(body).encode()).prompts
    shield = SpelledTokens(SPECIAL.values()).shield()
    assert prompt.messages is not None
    conversation = Conversation(prompt.messages, prompt.chat or ChatOptions())
    expected = oracle.apply_chat_template([USER, ANSWER], tokenize=False, **variables)
    assert conversation_text(ChatTemplate(source, SPECIAL), conversation, shield).replace(shield.mark, "") == expected


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    with pytest.raises(BadRequestError, match="no system"):
        ours(ChatTemplate(GEMMA, SPECIAL), CONVERSATIONS["system"], None)
