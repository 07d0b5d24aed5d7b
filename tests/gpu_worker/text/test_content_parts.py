"""Templates of models that see, which read the parts of a content: texts reach them in the form that they read."""

from __future__ import annotations

import pytest

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.spelled_tokens import SpelledTokens
from gpu_worker.text.template_messages import template_messages, text_parts
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
# As Granite 4 and Gemma 4 have them: parts are joined by a new line, or trimmed one by one; of tools, as they are.
GRANITE4 = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ ('' if loop.first else '\n') + part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}"
)
GEMMA4 = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'tool' %}{{ m.content }}{% elif m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part['text'] | trim if part['type'] == 'text' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
REFUSES = "{% for message in messages %}{{ raise_exception('no ' + message['type']) }}{% endfor %}"


def prompt(source: str, *messages: ChatMessage) -> str:
    template = ChatTemplate(source, {}, is_trusted=True)
    fields = template_messages(messages, template.needs, SpelledTokens([]).shield(), " !")
    return template.render(fields, add_generation_prompt=True)


def test_a_message_without_a_text_has_an_empty_part() -> None:
    messages = [ChatMessage(role="assistant", content=""), ChatMessage(role="user", content="x")]
    assert prompt(SMOLVLM, *messages) == "Assistant: <end>User: x !<end>Assistant:"


@pytest.mark.parametrize(("source", "has_parts"), [(LLAVA, True), (SMOLVLM, True), (QWEN2_VL, False), (REFUSES, False)])
def test_parts_are_for_templates_that_show_no_text(source: str, has_parts: bool) -> None:
    assert ChatTemplate(source, {}, is_trusted=True).needs.has_parts is has_parts
    assert not ChatTemplate(source, {}, is_trusted=False).needs.has_parts


def test_roles_whose_lists_a_template_would_show_get_one_text() -> None:
    needs = ChatTemplate(GEMMA4, {}, is_trusted=True).needs
    assert needs.part_roles == {"system", "developer", "user", "assistant"}
    result = ChatMessage(role="tool", content="ab", part_lengths=(1, 1))
    assert template_messages([result], needs, SpelledTokens([]).shield())[0]["content"] == "ab"


def test_continued_message_of_a_list_goes_on_behind_its_last_text() -> None:
    needs = ChatTemplate(GRANITE4, {}, is_trusted=True).needs
    message = ChatMessage(role="assistant", content="ab", part_lengths=(1, 1))
    [fields] = template_messages([message], needs, SpelledTokens([]).shield(), "!")
    assert fields["content"] == text_parts("a", "b!")


@pytest.mark.parametrize("lengths", [(1, 1), (0, 2), (5, 5), (2,), (1, 0, 0)])
def test_no_text_is_lost_whatever_the_lengths_say(lengths: tuple[int, ...]) -> None:
    assert "".join(ChatMessage(role="user", content="abc", part_lengths=lengths).parts) == "abc"
