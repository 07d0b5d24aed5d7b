"""Bodies of the Messages API become conversations, tools and sampling, or 400s that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.dialect import error_body
from gateway.anthropic.parsing import parse_count_tokens, parse_messages
from gateway.api.schemas.names import BodyRules
from gateway.generation import Generation
from shared.conversation import ChatMessage, ChatOptions, ToolCall
from shared.formats import ToolChoice
from tests.gateway.parsed_bodies import message as parsed
from tests.gateway.parsed_bodies import messages_of
from tests.gateway.refusals import refused

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
WORSE = [{"type": "text", "text": text} for text in ("bad", "worse")]


def options_of(generation: Generation) -> ChatOptions:
    options = generation.prompts[0].chat
    assert options is not None
    return options


def test_text_may_hold_any_character() -> None:
    generation = parsed(system="\0", messages=[{"role": "user", "content": [{"type": "text", "text": "a\0b"}]}])
    assert [message.content for message in messages_of(generation)] == ["\0", "a\0b"]


def test_conversation_with_thinking_and_tools_keeps_its_order() -> None:
    generation = parsed(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Add.", "signature": "x"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": WORSE, "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    )
    calls = (ToolCall(id="t1", name="add", arguments='{"a": 1}'), ToolCall(id="t2", name="add", arguments="{}"))
    assert messages_of(generation) == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="1+2?"),
        ChatMessage(role="assistant", content="I add.", reasoning="Add.", tool_calls=calls),
        ChatMessage(role="tool", content="3", tool_call_id="t1"),
        ChatMessage(role="tool", content="Error: bad\n\nworse", tool_call_id="t2"),
        ChatMessage(role="user", content="Well?"),
    )
    assert options_of(generation).add_generation_prompt


def test_last_turn_of_the_assistant_is_continued() -> None:
    options = options_of(
        parsed(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think"}])
    )
    assert options.continue_final_message
    assert not options.add_generation_prompt


def test_tools_reach_the_template_in_openais_form() -> None:
    generation = parsed(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert json.loads(options_of(generation).tools or "") == [{"type": "function", "function": function}]
    assert generation.tools is not None
    assert (generation.tools.choice, generation.tools.is_parallel) == (ToolChoice("required"), False)
    assert [tool.name for tool in generation.tools.tools] == ["add"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "tool", "name": "add"}, ToolChoice("required")),
    ],
)
def test_tool_choice_is_understood(choice: dict[str, Any] | None, expected: ToolChoice) -> None:
    use = parsed(tools=[TOOL], tool_choice=choice).tools
    assert use is not None
    assert (use.choice, use.is_parallel) == (expected, True)


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "none"}, []), ({"type": "tool", "name": "sub"}, ["sub"]), ({"type": "any"}, ["add", "sub"])],
)
def test_template_is_shown_only_tools_that_may_be_called(choice: dict[str, Any], names: list[str]) -> None:
    generation = parsed(tools=[TOOL, TOOL | {"name": "sub"}], tool_choice=choice)
    shown = json.loads(options_of(generation).tools or "[]")
    assert [tool["function"]["name"] for tool in shown] == names
    assert [tool.name for tool in (generation.tools.tools if generation.tools else ())] == names


def test_thinking_decides_the_templates_variable() -> None:
    assert options_of(parsed()).variables is None
    for left_to_template in ("adaptive", "between_tools"):
        assert options_of(parsed(thinking={"type": left_to_template})).variables is None
    enabled = parsed(thinking={"type": "enabled", "budget_tokens": 1024})
    assert json.loads(options_of(enabled).variables or "") == {"enable_thinking": True, "thinking": True}
    disabled = parsed(thinking={"type": "disabled"}, output_config={"effort": "max"})
    assert json.loads(options_of(disabled).variables or "") == {
        "enable_thinking": False,
        "thinking": False,
        "reasoning_effort": "high",
    }
    assert not disabled.may_reason


def test_variables_of_the_template_are_the_clients_unless_they_contradict_thinking() -> None:
    named = parsed(chat_template_kwargs={"enable_thinking": False, "tone": "dry"})
    assert json.loads(options_of(named).variables or "") == {"enable_thinking": False, "tone": "dry"}
    assert not named.may_reason
    error = refused(parsed, thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False})
    assert error.param == "chat_template_kwargs.enable_thinking"
    assert "contradicts 'thinking'" in error.message


def test_thinking_is_told_unless_its_display_is_omitted() -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    displays: list[dict[str, str]] = [{}, {"display": "summarized"}, {"display": "omitted"}]
    told = [parsed(thinking=enabled | display).includes_reasoning for display in displays]
    assert (told, parsed().includes_reasoning) == ([True, True, False], True)


def test_turn_of_the_assistant_in_which_nothing_is_said_is_a_turn() -> None:
    generation = parsed(messages=[{"role": role, "content": []} for role in ("user", "assistant")])
    assert messages_of(generation) == (ChatMessage(role="assistant", content=""),)


def test_sampling_is_what_the_body_says() -> None:
    output = {"type": "json_schema", "schema": {"type": "object"}}
    generation = parsed(temperature=0, top_p=0.5, top_k=7, stop_sequences=["END"], output_format=output)
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0, 0.5, 7)
    assert (sampling.stop, sampling.seed) == (("END",), 0)
    assert sampling.grammar is not None
    assert json.loads(sampling.grammar.source) == {"type": "object"}
    assert generation.deterministic
    assert parsed().sampling.temperature == 1.0


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "b"}
PNG_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA"}
PDF_SOURCE = {"type": "url", "url": "x"}


def user_block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def test_system_turn_stands_where_it_was_said() -> None:
    generation = parsed(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "system", "content": "b"},
            {"role": "system", "content": [{"type": "text", "text": "c"}]},
        ]
    )
    assert messages_of(generation) == (
        ChatMessage(role="user", content="a"),
        ChatMessage(role="system", content="b"),
        ChatMessage(role="system", content="c"),
    )


def test_document_of_text_is_part_of_the_turn() -> None:
    generation = parsed(**user_block(type="document", title="a", source=TEXT_SOURCE))
    assert messages_of(generation) == (ChatMessage(role="user", content="a\n\nb"),)


def test_document_tells_its_title_its_context_and_the_text_of_its_blocks() -> None:
    source = {"type": "content", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}
    generation = parsed(**user_block(type="document", title="a", context="of 2024", source=source))
    assert messages_of(generation) == (ChatMessage(role="user", content="a\n\nof 2024\n\nb\n\nc"),)


def test_result_of_a_search_is_read_by_itself_and_as_what_a_tool_found() -> None:
    found = {
        "type": "search_result",
        "source": "https://example.com/a",
        "title": "A page",
        "content": [{"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}}],
        "citations": {"enabled": True},
    }
    told = "A page\nhttps://example.com/a\n\nOne."
    assert messages_of(parsed(**user_block(**found))) == (ChatMessage(role="user", content=told),)
    result = {"type": "tool_result", "tool_use_id": "t", "content": [found]}
    assert messages_of(parsed(**user_block(**result))) == (ChatMessage(role="tool", content=told, tool_call_id="t"),)
    for name in ("title", "content"):
        error = refused(parsed, **user_block(**{**found, name: None}))
        assert (error.param, error.code) == (f"messages.[0].content.[0].{name}", "missing_required_parameter")
    assert "must be a string" in refused(parsed, **user_block(**found | {"source": TEXT_SOURCE})).message


@pytest.mark.parametrize("depth", [1, 100, 300, 450, 2000])
@pytest.mark.parametrize("kind", ["search_result", "tool_result", "document"])
def test_blocks_within_blocks_have_an_end(kind: str, depth: int) -> None:
    more = {"search_result": {"title": "a", "source": "b"}, "tool_result": {"tool_use_id": "t"}, "document": {}}[kind]
    text = '{"type":"text","text":"x"}'
    for _ in range(depth + 1):
        content = f'"content":[{text}]'
        if kind == "document":
            content = f'"source":{{"type":"content",{content}}}'
        text = f"{json.dumps({'type': kind} | more)[:-1]},{content}}}"
    body = f'{{"model":"m","max_tokens":9,"messages":[{{"role":"user","content":[{text}]}}]}}'
    refused(parse_messages, body.encode())


def test_block_that_is_not_served_is_refused_by_its_type_whatever_it_holds() -> None:
    found = {"type": "web_search_result", "url": "x", "encrypted_content": "y"}
    error = refused(parsed, **user_block(type="web_search_tool_result", tool_use_id="t", content=[found]))
    assert (error.param, error.code) == ("messages.[0].content.[0]", "unsupported_parameter")
    assert "the type 'web_search_tool_result'" in error.message
    within = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    assert "the type 'tool_reference'" in refused(parsed, **user_block(**within)).message


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"type": "text", "text": "a", "title": "b"}, "title"),
        ({"type": "text", "text": "a", "input": {}}, "input"),
        ({"type": "tool_result", "tool_use_id": "t", "text": "a"}, "text"),
        ({"type": "document", "source": TEXT_SOURCE, "content": "b"}, "content"),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a", "id": "b"}]}},
            "source.content.[0].id",
        ),
        (
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a", "id": "b"}]},
            "content.[0].id",
        ),
    ],
)
def test_field_of_another_type_of_block_is_refused_by_name(block: dict[str, Any], name: str) -> None:
    error = refused(parsed, **user_block(**block))
    assert (error.param, error.code) == (f"messages.[0].content.[0].{name}", "unknown_parameter")
    body = {"model": "m"} | user_block(**block)
    assert parse_messages(json.dumps(body | {"max_tokens": 9}).encode(), BodyRules(allow_unknown=True))
    refused(parse_count_tokens, json.dumps(body).encode())


def test_image_of_the_file_store_is_named_by_its_id() -> None:
    block = user_block(type="image", source={"type": "file", "file_id": "file_011"})
    (image,) = parsed(**block).prompts[0].images
    assert (image.file_id, image.where) == ("file_011", "messages.[0].content.[0].source.file_id")


def test_document_in_a_document_is_refused_by_its_type_whatever_it_holds() -> None:
    block: dict[str, Any] = {"type": "text", "text": "a", "id": "b"}
    for _ in range(3):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    error = refused(parsed, **user_block(**block))
    assert (error.param, error.code) == ("messages.[0].content.[0].source.content.[0]", "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.[0].role"),
        (user_block(type="image"), "messages.[0].content.[0].source"),
        (user_block(type="text"), "messages.[0].content.[0].text"),
        (user_block(type="text", text="a", tool_use_id="b"), "messages.[0].content.[0].tool_use_id"),
        (user_block(type="image", source=PNG_SOURCE), "messages.[0].content.[0].source.data"),
        (user_block(type="image", source={"type": "url", "url": "a"}), "messages.[0].content.[0].source.url"),
        (user_block(type="document", source=PDF_SOURCE), "messages.[0].content.[0].source"),
        (
            user_block(type="document", source=TEXT_SOURCE | {"media_type": "text/html"}),
            "messages.[0].content.[0].source.media_type",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 5}]}
                ]
            },
            "messages.[0].content.[0].input",
        ),
        (user_block(type="tool_result", content="x"), "messages.[0].content.[0].tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools.[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.[0].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools.[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"compaction": {"type": "compaction"}}, "compaction"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": "é" * 100}, "model"),
        ({"stop_sequences": ["\0"]}, "stop_sequences"),
    ],
)
def test_wrong_value_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    assert refused(parsed, **fields).param == param


@pytest.mark.parametrize("name", ["output_format", "output_config.format"])
def test_schema_that_is_none_is_named_by_its_place(name: str) -> None:
    output: dict[str, Any] = {"type": "json_schema", "schema": 5}
    fields = {"output_format": output} if name == "output_format" else {"output_config": {"format": output}}
    assert (refused(parsed, **fields).param or "").startswith(f"{name}.schema")


def test_context_management_that_changes_nothing_passes() -> None:
    parsed(context_management={"edits": []})
    parsed(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


def test_thread_is_refused_in_the_words_that_let_anthropics_tool_runner_go_on_without() -> None:
    error = json.loads(error_body(refused(parsed, thread={"type": "create"})))["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_field_that_a_block_lacks_has_the_code_of_a_missing_one() -> None:
    error = refused(parsed, **user_block(type="text"))
    assert (error.param, error.code) == ("messages.[0].content.[0].text", "missing_required_parameter")


def test_tokens_of_a_whole_body_can_be_counted() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": 5}
    model, call, _ = parse_count_tokens(json.dumps(body).encode())
    assert model == "m"
    assert call.messages == (ChatMessage(role="user", content="hi"),)
    assert call.chat is not None
    assert "add" in (call.chat.tools or "")


def test_names_of_newer_libraries_that_change_nothing_here_pass() -> None:
    parsed(speed="standard", diagnostics={"previous_message_id": None}, billing_policy={}, fallbacks=[])
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "toolset_name": "browser"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x", "toolset_name": "browser"}
    parsed(messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])


def test_block_in_the_turn_of_another_is_told_whose_turn_it_belongs_to() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    thinking = {"type": "thinking", "thinking": "Add.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    cases = ("user", use, "assistant"), ("user", thinking, "assistant"), ("assistant", result, "user")
    for role, block, owner in cases:
        error = refused(parsed, messages=[{"role": role, "content": [block]}])
        assert error.param == "messages.[0].content.[0]"
        assert error.message.endswith(f"It may stand in a turn of the {owner} alone.")


def test_blocks_of_a_document_may_have_what_blocks_have() -> None:
    inner = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "citations": None}
    source = {"type": "content", "content": [inner]}
    generation = parsed(**user_block(type="document", source=source))
    assert messages_of(generation) == (ChatMessage(role="user", content="hello"),)
    error = refused(parsed, **user_block(type="document", source=source | {"speed": 1}))
    assert error.param == "messages.[0].content.[0].source.speed"


def test_tool_of_anthropics_server_is_refused_by_its_type_whatever_it_holds() -> None:
    advisor = {"type": "advisor_20260301", "name": "advisor", "model": "other", "caching": None, "max_tokens": 9}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "s", "tools": [{"name": "f"}]}
    for tool in (advisor, toolset):
        assert refused(parsed, tools=[tool]).param == "tools.[0].type"


def test_what_a_message_asks_of_later_requests_is_refused_with_what_to_do() -> None:
    hi = {"role": "user", "content": "hi"}
    for fields in ({"clear_at": "next_user_message"}, {"output_config": {"effort": "low"}}):
        error = refused(parsed, messages=[hi, {"role": "system", "content": "Be brief.", **fields}])
        assert (error.param, error.code) == (f"messages.[1].{next(iter(fields))}", "unsupported_parameter")


def test_stream_that_can_be_resumed_has_to_be_a_stream() -> None:
    assert refused(parsed, stream_options={"resumable": True}).param == "stream_options"
    assert parsed(stream=True, stream_options={"resumable": True}).is_resumable
    for options in (None, {}, {"resumable": False}):
        assert not parsed(stream_options=options).is_resumable
