"""What a template refuses is known when it is loaded, and no template is given a null that it does not look for."""

from __future__ import annotations

import pytest

from gpu_worker.text.chat_template import ChatTemplate
from gpu_worker.text.conversation_text import KINDS, refused_kinds

# As Qwen3 has it: the reasoning may be none, and the content is looked into.
QWEN3 = (
    "{% for m in messages %}{% if m.reasoning_content is defined and m.reasoning_content is not none %}"
    "{{ m.reasoning_content }}{% elif '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %};"
    "{% endfor %}"
)
# As Ministral-3-Reasoning: it looks for both, and a content that is none would be added to a text.
MINISTRAL = (
    "{% for m in messages %}{% if m['reasoning_content'] is none %}-{% endif %}"
    "{% if m['content'] is not none or m['role'] == 'assistant' %}{{ '[' + m['content'] + ']' }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] + call['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(("source", "has_null"), [(QWEN3, False), (MINISTRAL, False), (DEEPSEEK, True), (GEMMA, False)])
def test_null_is_for_templates_that_look_for_a_content_that_is_none(source: str, has_null: bool) -> None:
    assert ChatTemplate(source, {}).needs.has_null_content is has_null


@pytest.mark.parametrize("source", [QWEN3, MINISTRAL, DEEPSEEK])
def test_every_kind_of_conversation_is_rendered(source: str) -> None:
    assert refused_kinds(ChatTemplate(source, {})) == {}


def test_kind_that_a_template_refuses_is_named_with_the_reason() -> None:
    refused = refused_kinds(ChatTemplate(GEMMA, {}))
    assert list(refused) == ["a system message"]
    assert "no system" in refused["a system message"]
    assert set(refused) < set(KINDS)
