from __future__ import annotations

import pytest

from shared.formats import ContentText, Tool, ToolChoice, detect_format, format_named, format_names
from shared.grammar import Grammar

# Written for these tests in the manner of each family's templates: how they write a call, and how they open a turn.
_TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "thinking": "{{ m.content.split('</think>')[-1] }}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    "hermes": '{{ "<tool_call>\\n" }}{"name": "{{ call.name }}", "arguments": {{ call.arguments }}}\n</tool_call>',
    "hermes-thinking": "{{ '<think>\\n' + m.reasoning_content + '\\n</think>' }}{{ '<tool_call>\\n{\"name\": \"' }}",
    "qwen-coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}",
    "qwen-coder-thinking": "</think>{{ '<tool_call>\\n<function=' + call.name }}{{ '<parameter=' + key + '>' }}",
    "glm": "<think></think>{{ '<tool_call>' + call.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "deepseek-v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' }}",
    "deepseek-r1": "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜>' }}{{ '<｜Assistant｜><think>\\n' }}",
    "deepseek-v3.1": "{% if not thinking %}</think>{% else %}<think>{% endif %}{{ '<｜tool▁calls▁begin｜>' }}",
    "deepseek-v3.2": "{% set dsml = '｜DSML｜' %}<{{ dsml }}function_calls><think></think>{% if thinking %}",
    "kimi": "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>{{ c.id }}",
    "kimi-thinking": "<think>{{ r }}</think><|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}",
    "minimax": "{% set begin = '<minimax:tool_call>' %}<invoke name=\"{{ name }}\"></think>",
    "lfm": "{{ '<|tool_call_start|>[' + calls | join(', ') + ']<|tool_call_end|>' }}",
    "mistral-list": '[TOOL_CALLS][{"name": "{{ call.name }}", "arguments": {{ call.arguments }}}]',
    "mistral": "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}",
    "mistral-thinking": "{{ '[THINK]' + block.thinking + '[/THINK]' }}{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}",
    "gemma": "{{ '<|tool_call>call:' + function.name + '{' }}{{ '<|channel>thought\\n<channel|>' }}",
    "function-gemma": "{{ '<start_function_call>call:' + name + '{' + '<escape>' }}",
    "llama-json": '<|start_header_id|>assistant{{ \'{"name": "\' + call.name + \'", "parameters": \' }}',
    "llama-pythonic": "<|header_start|>system Write [func_name1(params_name1=params_value1), func_name2()]",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>",
}


def test_every_format_has_a_template_here() -> None:
    assert _TEMPLATES.keys() == set(format_names())


@pytest.mark.parametrize("name", _TEMPLATES)
def test_format_is_known_by_its_template(name: str) -> None:
    assert detect_format(_TEMPLATES[name]) == name


@pytest.mark.parametrize(
    ("name", "prompt", "starts"),
    [
        ("hermes-thinking", "<|im_start|>assistant\n<think>\n", True),
        ("hermes-thinking", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("hermes-thinking", "<|im_start|>assistant\n", False),
        ("hermes-thinking", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("hermes", "<|im_start|>assistant\n<think>\n", False),
        ("deepseek-v3.1", "<｜Assistant｜></think>", False),
        ("deepseek-v3.1", "<｜Assistant｜><think>", True),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma", "<|turn>model\n<|channel>thought\n", True),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("mistral-thinking", "[/INST][THINK]", True),
        ("plain", "<think>", False),
    ],
)
def test_prompt_that_opens_the_reasoning_is_known_by_its_end(name: str, prompt: str, starts: bool) -> None:
    assert format_named(name).starts_in_reasoning(prompt) is starts


def test_continued_answer_may_be_inside_of_reasoning() -> None:
    spoken = format_named("hermes-thinking")
    assert spoken.starts_in_reasoning("…<think>\nI am", "<think>\nI am")
    assert not spoken.starts_in_reasoning("…<think>a</think>\nI", "<think>a</think>\nI")
    assert not spoken.starts_in_reasoning("…I am", "I am")


@pytest.mark.parametrize("name", [name for name in _TEMPLATES if name.endswith("-thinking")])
def test_family_that_thinks_has_the_tokens_of_its_calls_and_of_its_thoughts(name: str) -> None:
    found, plain = format_named(name), format_named(name.removesuffix("-thinking"))
    assert found.has_reasoning
    assert plain.tokens
    assert {*plain.tokens} < {*found.tokens}


@pytest.mark.parametrize("name", ["", "plain", "a family of tomorrow"])
def test_name_without_a_description_reads_all_text_as_content(name: str) -> None:
    reader = format_named(name).reader([Tool("f")])
    assert reader.feed('<tool_call>{"name": "f"}') == [ContentText('<tool_call>{"name": "f"}')]
    assert reader.finish() == []


@pytest.mark.parametrize("name", format_names())
def test_format_is_found_by_its_own_name(name: str) -> None:
    assert format_named(name).name == name


def test_model_without_a_template_speaks_the_plain_format() -> None:
    assert detect_format(None) == "plain"
    assert detect_format("{{ messages }}") == "plain"


def test_plain_format_constrains_the_content_alone() -> None:
    content = Grammar(kind="json_schema", source="{}")
    assert format_named("plain").grammar([], ToolChoice(), content=content) == content
    assert format_named("plain").grammar([], ToolChoice()) is None
