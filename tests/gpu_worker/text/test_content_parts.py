"""Templates of models that see, which read the parts of a content: texts reach them in the form that they read."""

from __future__ import annotations

import pytest

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.spelled_tokens import SpelledTokens
from gpu_worker.text.template_messages import template_messages
from shared.conversation import ChatMessage

# As LLaVA 1.5, SmolVLM and Qwen2-VL have them, without what is said of images.
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN2_VL = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}[{{ content['type'] }}]{% endfor %}{% endif %}<end>{% endfor %}"
)
REFUSES = "{% for message in messages %}{{ raise_exception('no ' + message['type']) }}{% endfor %}"


def prompt(source: str, *messages: ChatMessage) -> str:
    template = ChatTemplate(source, {}, is_trusted=True)
    fields = template_messages(messages, template.needs, SpelledTokens([]).shield(), " !")
    return template.render(fields, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LLAVA, "USER: what is it? ASSISTANT: a USER: and now? ! ASSISTANT:"),
        (SMOLVLM, "User: what is it?<end>Assistant: a<end>User: and now? !<end>Assistant:"),
        (QWEN2_VL, "user: what is it?<end>assistant: a<end>user: and now? !<end>"),
    ],
)
def test_a_text_reaches_the_prompt(source: str, expected: str) -> None:
    texts = (("user", "what is it?"), ("assistant", "a"), ("user", "and now?"))
    messages = [ChatMessage(role=role, content=text) for role, text in texts]
    assert prompt(source, *messages) == expected


def test_a_message_without_a_text_has_an_empty_part() -> None:
    messages = [ChatMessage(role="assistant", content=""), ChatMessage(role="user", content="x")]
    assert prompt(SMOLVLM, *messages) == "Assistant: <end>User: x !<end>Assistant:"


@pytest.mark.parametrize(("source", "has_parts"), [(LLAVA, True), (SMOLVLM, True), (QWEN2_VL, False), (REFUSES, False)])
def test_parts_are_for_templates_that_show_no_text(source: str, has_parts: bool) -> None:
    assert ChatTemplate(source, {}, is_trusted=True).needs.has_parts is has_parts
    assert not ChatTemplate(source, {}, is_trusted=False).needs.has_parts
