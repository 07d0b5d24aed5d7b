"""Tools, calls, reasoning and variables through templates of several families of models, and refused messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gpu_worker.text.chat_template import ChatTemplate, conversation_text
from gpu_worker.text.spelled_tokens import SpelledTokens
from gpu_worker.text.template_messages import template_messages, text_parts
from shared.conversation import ChatMessage, ChatOptions, Conversation, ToolCall
from shared.errors import BadRequestError

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds é.", "parameters": {"type": "object"}}}]
USER = ChatMessage(role="user", content="2+3?")
CALL = ToolCall(id="call_1", name="add", arguments='{"b":3, "a": [2]}')
CALLING = ChatMessage(role="assistant", content="", reasoning="hm", tool_calls=(CALL,))
RESULT = ChatMessage(role="tool", content="5", tool_call_id="call_1")
HISTORY = (USER, CALLING, RESULT)

# JSON of the arguments, as an object, within a tag; reasoning; results as turns of the user.
HERMES = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<r>{{ m.content }}</r>"
    "{% elif m.tool_calls %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for tool_call in m.tool_calls %}{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
    '<tool_call>{"name": "{{ tool_call.name }}", "arguments": '
    "{% if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}"
    "{% endif %}}</tool_call>{% endfor %}{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
# The arguments are added to a text, and the message has no content.
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for tool in m['tool_calls'] %}{{ '<call>' + tool['type'] + '<sep>' + tool['function']['name'] + "
    "'\n```json\n' + tool['function']['arguments'] + '\n```' }}{% endfor %}{% else %}"
    "{{ m['content'] }};{% endif %}{% endfor %}"
)
# Each argument stands by itself.
CODER = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>"
    "{{ value | tojson if value is not string else value }}</parameter>{% endfor %}</function>{% endfor %}{% endfor %}"
)
# Ids of nine letters or digits, or an error.
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ call.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
)
# Results name their function; reasoning is `thinking`.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'tool' %}functions.{{ m.name }} to=assistant {{ m.content | tojson }}"
    "{% elif m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.thinking or m.content }}|{{ m.tool_calls[0].function.arguments | tojson }}|{% endif %}{% endfor %}"
    "effort={{ reasoning_effort | default('medium') }}"
)
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
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] + call['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def render(source: str, *messages: ChatMessage, **options: Any) -> str:
    conversation = Conversation(messages, ChatOptions(**options))
    return conversation_text(ChatTemplate(source, {}), conversation, SpelledTokens([]).shield())


def test_calls_and_tools_are_json_where_a_template_writes_json() -> None:
    text = render(HERMES, *HISTORY, tools=json.dumps(TOOLS))
    assert text == (
        f"[{json.dumps(TOOLS[0], ensure_ascii=False)}]user:2+3?;<think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"b": 3, "a": [2]}}</tool_call><r>5</r>'
    )


def test_tool_without_a_description_is_written_as_transformers_writes_it() -> None:
    function = {"name": "now", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    # `apply_chat_template` of transformers hands the tools on as they are.
    assert render("{{ tools | tojson }}", USER, tools=json.dumps(tools)) == json.dumps(tools)
    looks = "{% for t in tools %}{% if t.function.description is defined %}D{% else %}-{% endif %}{% endfor %}"
    assert render(looks, USER, tools=json.dumps([*tools, *TOOLS])) == "-D"


def test_description_is_empty_where_a_template_adds_it_to_a_text() -> None:
    adds = "{% for t in tools %}{{ '// ' + t.function.description + ';' + t.function.name }}{% endfor %}"
    bare = {"type": "function", "function": {"name": "now"}}
    assert render(adds, USER, tools=json.dumps([bare, *TOOLS])) == "// ;now// Adds é.;add"
    with pytest.raises(BadRequestError, match="no tools"):
        render("{{ raise_exception('no tools') }}", USER, tools=json.dumps([bare]))


def test_arguments_are_the_models_own_text_where_a_template_adds_them_to_a_text() -> None:
    assert render(DEEPSEEK, *HISTORY) == '2+3?;<call>function<sep>add\n```json\n{"b":3, "a": [2]}\n```5;'
    printed = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(printed, CALLING) == CALL.arguments
    joined = "{{ messages[0].tool_calls[0].function.arguments ~ '!' }}"
    assert render(joined, CALLING) == CALL.arguments + "!"
    assert render("{{ messages[0].tool_calls[0].function.arguments + '!' }}", CALLING) == CALL.arguments + "!"


def test_arguments_are_an_object_where_a_template_looks_into_them() -> None:
    assert render(CODER, CALLING) == "<function=add><parameter=b>3</parameter><parameter=a>[2]</parameter></function>"


@pytest.mark.parametrize(("arguments", "told"), [('{"a": 1',) * 2, ("[1]",) * 2, ("5",) * 2, ("", "{}")])
def test_arguments_that_are_no_object_stay_a_text_and_none_are_an_empty_object(arguments: str, told: str) -> None:
    message = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="", name="f", arguments=arguments),))
    assert render(HERMES, message) == f'<tool_call>{{"name": "f", "arguments": {told}}}</tool_call>'
    assert render("{{ '' + messages[0].tool_calls[0].function.arguments }}", message) == told


def test_ids_are_shortened_alike_for_call_and_result_where_a_template_wants_it() -> None:
    call, _, result = render(MISTRAL, *HISTORY).partition("=")
    assert call == result
    assert len(call) == 9
    kept = ChatMessage(role="tool", content="", tool_call_id="aB3456789")
    assert render(MISTRAL, kept) == "=aB3456789"
    assert render("{{ messages[0].tool_calls[0].id }}", CALLING) == "call_1"


def test_result_has_the_name_of_the_function_that_was_called() -> None:
    assert render(HARMONY, *HISTORY).startswith('hm|{"b": 3, "a": [2]}|functions.add to=assistant "5"')
    both = ChatMessage(role="assistant", content="let me", reasoning="hm", tool_calls=(CALL,))
    assert render(HARMONY, both).startswith("let me|")
    own = ChatMessage(role="tool", content="5", tool_call_id="call_1", name="mine")
    assert "functions.mine" in render(HARMONY, CALLING, own)


def test_variables_reach_the_template_and_change_special_tokens_alone() -> None:
    assert render(HARMONY, variables='{"reasoning_effort":"high"}') == "effort=high"
    variables = '{"messages": [], "add_generation_prompt": false, "tools": [1], "eos_token": "x"}'
    template = ChatTemplate(PLAIN + "{{ tools }}{{ eos_token }}", {"eos_token": "<e>"})
    conversation = Conversation((USER,), ChatOptions(variables=variables))
    assert conversation_text(template, conversation, SpelledTokens([]).shield()) == "[user]2+3?>Nonex"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        (PLAIN, "developer"),
        ("{% if messages[0].role == 'system' %}[system]be brief>{% endif %}", "system"),
        (
            "{% if messages[0].role in ['system', 'developer'] %}[{{ messages[0].role }}]be brief>{% endif %}",
            "developer",
        ),
    ],
)
def test_developer_is_the_system_for_templates_that_know_only_that(source: str, role: str) -> None:
    assert render(source, ChatMessage(role="developer", content="be brief")) == f"[{role}]be brief>"


@pytest.mark.parametrize("source", [PLAIN, PLAIN.replace(" | trim", "")])
@pytest.mark.parametrize("content", ["Well: ", " Well:\n", "Well", "2+3?"])
def test_last_message_is_left_open_as_by_transformers(source: str, content: str) -> None:
    library = Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source)
    messages = [USER, ChatMessage(role="assistant", content=content)]
    given = [{"role": message.role, "content": message.content} for message in messages]
    expected = oracle.apply_chat_template(given, tokenize=False, continue_final_message=True)
    assert render(source, *messages, continue_final_message=True) == expected


def test_last_message_may_be_a_thought() -> None:
    thought = ChatMessage(role="assistant", content="", reasoning="so ")
    thinking = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }};{% endfor %}"
    assert render(thinking, thought, continue_final_message=True) == "<think>so "


def test_last_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(BadRequestError) as raised:
        render("nothing", USER, continue_final_message=True)
    assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": "{"}, "tools"),
        ({"tools": "5"}, "tools"),
        ({"variables": "[]"}, "chat_template_kwargs"),
        ({"variables": '{"a":' * 100_000}, "messages"),
        ({"tools": "[" * 300 + "]" * 300 * 10}, "tools"),
    ],
)
def test_what_is_no_json_or_nested_too_deeply_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        render(PLAIN, USER, **options)
    assert raised.value.param == param


def test_turn_with_calls_keeps_what_was_said_before_them() -> None:
    said = ChatMessage(role="assistant", content="I add.", tool_calls=(CALL,))
    assert render(DEEPSEEK, USER, said, RESULT) == "2+3?;I add.;5;"


def test_json_has_its_keys_in_order_where_a_template_wants_it() -> None:
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", USER) == '{"a": 2, "b": 1}'


@pytest.mark.parametrize(
    ("source", "has_null"), [(QWEN3, False), (MINISTRAL, False), (DEEPSEEK_R1, True), (GEMMA, False)]
)
def test_null_is_for_templates_that_look_for_a_content_that_is_none(source: str, has_null: bool) -> None:
    assert ChatTemplate(source, {}).needs.has_null_content is has_null


# As LLaVA 1.5, SmolVLM and Qwen2-VL have them, without their parts about images.
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
