"""Anthropic's own library."""

from __future__ import annotations

import anthropic
from anthropic.types import RawMessageStreamEvent, ServerToolUseBlock, WebSearchResultBlock, WebSearchToolResultBlock
from cells import (
    CALLING,
    KEY,
    MODEL,
    NUM_OF_PICTURE,
    NUM_SEEN,
    NUM_TURNS,
    PICTURE,
    SCHEMA,
    SEEING,
    THINKING,
    URL,
    check_person,
    picture,
    run,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
thinking = anthropic.Anthropic(base_url=THINKING.url, api_key=THINKING.key, max_retries=0, timeout=120)
calling = anthropic.Anthropic(base_url=CALLING.url, api_key=CALLING.key, max_retries=0, timeout=120)
seeing = anthropic.Anthropic(base_url=SEEING.url, api_key=SEEING.key, max_retries=0, timeout=120)
MESSAGES = [{"role": "user", "content": "Somebody, please."}]
TOOL = {"name": "person", "description": "Store.", "input_schema": SCHEMA, "strict": True}
# The library knows no temperature any more.
GREEDY = {"temperature": 0}
# The demo model would go on calling.
CHOICE = {"type": "any", "disable_parallel_tool_use": True}


def chat() -> None:
    message = client.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES, system="Be brief.")
    assert message.content[0].text
    assert 1 <= message.usage.output_tokens <= 8


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text
    assert 1 <= final.usage.output_tokens <= 8


def resumed_stream() -> None:
    raw = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=40, messages=MESSAGES, stream=True, extra_body={"stream_options": {"resumable": True}}
    )
    stream_id, stream = raw.headers["x-request-id"], raw.parse()
    first = next(iter(stream))
    stream.close()
    assert first.type == "message_start"

    def told(first_event: int) -> list[object]:
        again = client.get(
            f"/v1/streams/{stream_id}",
            cast_to=RawMessageStreamEvent,
            stream=True,
            stream_cls=anthropic.Stream[RawMessageStreamEvent],
            options={"params": {"from": first_event}},
        )
        return [event.to_dict() for event in again]

    whole = told(0)
    assert (whole[0], whole[-1]["type"]) == (first.to_dict(), "message_stop")
    rest = told(5)
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


def stop() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=12, messages=MESSAGES, extra_body=GREEDY).content[0].text
    cut = client.messages.create(
        model=MODEL, max_tokens=12, messages=MESSAGES, extra_body=GREEDY, stop_sequences=[whole[3:6]]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", whole[3:6])


def tool_call() -> None:
    message = client.messages.create(model=MODEL, max_tokens=400, messages=MESSAGES, tools=[TOOL], tool_choice=CHOICE)
    assert message.stop_reason == "tool_use"
    check_person(message.content[-1].input)


def streamed_tool_call() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=400,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "person", "disable_parallel_tool_use": True},
    ) as events:
        final = events.get_final_message()
    check_person(final.content[-1].input)


def tool_loop() -> None:
    messages: list[object] = list(MESSAGES)
    for _ in range(NUM_TURNS):
        message = client.messages.create(
            model=MODEL, max_tokens=200, messages=messages, tools=[TOOL], tool_choice=CHOICE
        )
        [call] = [block for block in message.content if block.type == "tool_use"]
        check_person(call.input)
        messages.append({"role": "assistant", "content": message.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "stored"}
        messages.append({"role": "user", "content": [result]})


def tool_runner() -> None:
    @anthropic.beta_tool
    def is_adult(adult: bool) -> str:
        """Store it.

        Args:
            adult: Whether somebody is.
        """
        return str(adult)

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[is_adult], tool_choice=CHOICE, max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]


def count() -> None:
    few = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    assert 0 < few <= client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL]).input_tokens


def thoughts() -> None:
    asked = {"model": THINKING.model, "max_tokens": 16, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with thinking.messages.stream(messages=MESSAGES, **asked) as events:
        told = "".join(event.thinking for event in events if event.type == "thinking")
        [block] = events.get_final_message().content
    assert (block.type, block.thinking, bool(told)) == ("thinking", told, True)
    history = [*MESSAGES, {"role": "assistant", "content": [block]}, *MESSAGES]
    assert thinking.messages.create(messages=history, **asked).content[0].type == "thinking"


def defined_tools() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 1000},
        {"type": "memory_20250818", "name": "memory"},
    ]
    for tool in tools:
        choice = {"type": "tool", "name": tool["name"], "disable_parallel_tool_use": True}
        message = client.messages.create(
            model=MODEL, max_tokens=100, messages=MESSAGES, tools=tools, tool_choice=choice
        )
        # The demo model may not find the end of a text.
        assert message.stop_reason in ("tool_use", "max_tokens")
        assert (message.content[-1].type, message.content[-1].name) == ("tool_use", tool["name"])


def search_results() -> None:
    found = {
        "type": "search_result",
        "source": "https://example.com/",
        "title": "A page",
        "content": [{"type": "text", "text": "Somebody is here."}],
    }
    message = client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": [found]}])
    assert message.usage.input_tokens > 5


def hosted_history() -> None:
    call = ServerToolUseBlock(id="srvtoolu_1", name="web_search", input={"query": "somebody"}, type="server_tool_use")
    found = WebSearchResultBlock(
        type="web_search_result", title="A page", url="https://example.com/", encrypted_content="AAAA", page_age=None
    )
    result = WebSearchToolResultBlock(tool_use_id=call.id, type="web_search_tool_result", content=[found])
    history = [*MESSAGES, {"role": "assistant", "content": [call, result, {"type": "text", "text": "Me."}]}, *MESSAGES]
    message = client.messages.create(model=MODEL, max_tokens=8, messages=history)
    assert message.content[0].text
    few = client.messages.count_tokens(model=MODEL, messages=[*MESSAGES, *MESSAGES]).input_tokens
    assert message.usage.input_tokens > few + 20


def tool_not_offered() -> None:
    messages: list[object] = list(MESSAGES)
    for _ in range(2):
        asked = {"model": CALLING.model, "max_tokens": 50, "messages": messages, "tools": [{**TOOL, "strict": False}]}
        message = calling.messages.create(**asked)
        [call] = message.content
        assert (message.stop_reason, call.name, call.input) == ("tool_use", "nobody", {"who": "me"})
        with calling.messages.stream(**asked) as events:
            assert events.get_final_message().content[0].name == "nobody"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "There is no such tool.", "is_error": True}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]


def errors() -> None:
    try:
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was taken")
    try:
        client.messages.create(model="nobody", max_tokens=1, messages=MESSAGES)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model answered")
    try:
        client.models.retrieve("nobody")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model was shown")


def _looked(source: dict[str, str], api: object) -> None:
    turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Look"}]}
    usage = api.messages.create(model=SEEING.model, max_tokens=4, messages=[turn]).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == NUM_SEEN, usage


def images() -> None:
    _looked({"type": "base64", "media_type": "image/png", "data": PICTURE}, seeing)
    assert seeing.models.retrieve(SEEING.model).capabilities.image_input.supported


def streamed_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Look"}]}
    with seeing.messages.stream(model=SEEING.model, max_tokens=4, messages=[turn]) as stream:
        usage = stream.get_final_message().usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == NUM_SEEN, usage


def result_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    parts = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]
    counts = []
    for content in (parts, parts[:1]):
        turns = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]},
        ]
        counts.append(seeing.messages.count_tokens(model=SEEING.model, messages=turns).input_tokens)
        usage = seeing.messages.create(model=SEEING.model, max_tokens=4, messages=turns).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counts[-1], usage
    assert counts[0] == counts[1] + NUM_OF_PICTURE, counts


def file_images() -> None:
    file = seeing.beta.files.upload(file=("a.png", picture(), "image/png"))
    _looked({"type": "file", "file_id": file.id}, seeing.beta)
    seeing.beta.files.delete(file.id)


def files() -> None:
    uploaded = [client.beta.files.upload(file=(f"{name}.png", picture(), "image/png")) for name in "abc"]
    file = client.beta.files.retrieve_metadata(uploaded[0].id)
    assert (file.mime_type, file.size_bytes, file.filename) == ("image/png", len(picture()), "a.png"), file
    listed = [each.id for each in client.beta.files.list(limit=1)]
    assert [each for each in listed if each in {one.id for one in uploaded}] == [one.id for one in uploaded[::-1]]
    assert client.beta.files.download(file.id).read() == picture()
    for each in uploaded:
        assert client.beta.files.delete(each.id).type == "file_deleted"


run(
    {
        "chat": chat,
        "stream with usage": stream,
        "resumed streams": resumed_stream,
        "stop": stop,
        "tool call": tool_call,
        "streamed tool call": streamed_tool_call,
        "loop of tool calls": tool_loop,
        "tool runner": tool_runner,
        "token counting": count,
        "thinking": thoughts,
        "bash, text editor, memory": defined_tools,
        "results of searches": search_results,
        "history of the provider's own tools": hosted_history,
        "call of a tool that was not offered": tool_not_offered,
        "typed errors": errors,
        "images": images,
        "files": files,
        "images of files": file_images,
        "streamed images": streamed_images,
        "images in results of tools": result_images,
    }
)
