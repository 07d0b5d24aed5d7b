"""OpenAI's own library."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

import openai
from cells import (
    CALLING,
    KEY,
    MODEL,
    NUM_OF_PICTURE,
    NUM_SEEN,
    NUM_TURNS,
    PICTURE_URL,
    SCHEMA,
    SEEING,
    THINKING,
    URL,
    check_person,
    picture,
    run,
)
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import (
    ResponseCodeInterpreterToolCall,
    ResponseCustomToolCall,
    ResponseFileSearchToolCall,
    ResponseFunctionWebSearch,
)
from openai.types.responses.response_output_item import McpCall
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
thinking = openai.OpenAI(base_url=f"{THINKING.url}/v1", api_key=THINKING.key, max_retries=0, timeout=120)
calling = openai.OpenAI(base_url=f"{CALLING.url}/v1", api_key=CALLING.key, max_retries=0, timeout=120)
seeing = openai.OpenAI(base_url=f"{SEEING.url}/v1", api_key=SEEING.key, max_retries=0, timeout=120)
THOUGHT = {"model": THINKING.model, "input": "hello", "max_output_tokens": 16}
MESSAGES = [{"role": "user", "content": "Somebody, please."}]
TOOL = {"type": "function", "function": {"name": "person", "description": "Store.", "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", "name": "person", "parameters": SCHEMA, "strict": True}


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


class Point(BaseModel):
    places: dict[Literal["x", "y"], Annotated[int, Field(ge=0, le=99)]]


# What OpenAI's own tools leave in a history, as its library reads it.
HOSTED = [
    ResponseFunctionWebSearch(
        id="ws_1", type="web_search_call", status="completed", action={"type": "search", "query": "somebody"}
    ),
    ResponseFileSearchToolCall(
        id="fs_1",
        type="file_search_call",
        status="completed",
        queries=["somebody"],
        results=[{"file_id": "f", "filename": "a.txt", "score": 0.5, "text": "Somebody is here."}],
    ),
    ResponseCodeInterpreterToolCall(
        id="ci_1",
        type="code_interpreter_call",
        status="completed",
        container_id="c",
        code="print(1)",
        outputs=[{"type": "logs", "logs": "1"}],
    ),
    McpCall(id="mcp_1", type="mcp_call", name="find", server_label="people", arguments="{}", output="somebody"),
    ResponseCustomToolCall(id="ct_1", type="custom_tool_call", call_id="call_1", name="free", input="who?"),
]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].message.content
    assert 1 <= answer.usage.completion_tokens <= 8


def stream() -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert 1 <= chunks[-1].usage.completion_tokens <= 8


def text() -> None:
    answer = client.completions.create(model=MODEL, prompt=["def f(", "x ="], max_tokens=4, n=2, logprobs=2)
    assert len(answer.choices) == 4
    assert answer.choices[0].logprobs.tokens


def choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 3
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def best_of() -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**asked, best_of=3)
    # Those that were not chosen count too.
    assert (len(answer.choices), answer.usage.completion_tokens) == (1, 12)


def stop() -> None:
    whole = client.completions.create(model=MODEL, prompt="x", max_tokens=12, temperature=0).choices[0].text
    cut = client.completions.create(model=MODEL, prompt="x", max_tokens=12, temperature=0, stop=[whole[3:6]])
    assert cut.choices[0].text == whole[: whole.index(whole[3:6])]
    assert cut.choices[0].finish_reason == "stop"


def json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=400, response_format={"type": "json_object"}, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def json_schema() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, max_tokens=400, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)


def tool_call() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=400,
        tools=[_strict(TOOL)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "person")
    check_person(json.loads(call.function.arguments))


def streamed_tool_call() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=400,
        tools=[openai.pydantic_function_tool(Person, name="person")],
        tool_choice={"type": "function", "function": {"name": "person"}},
        parallel_tool_calls=False,
    ) as events:
        message = events.get_final_completion().choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Person)


def tool_loop() -> None:
    messages: list[object] = list(MESSAGES)
    for _ in range(NUM_TURNS):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=200,
            tools=[_strict(TOOL)],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        assert len(message.tool_calls) == 1
        check_person(json.loads(message.tool_calls[0].function.arguments))
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "stored"})


def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a", "b"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) > 8


def batch_lines() -> bytes:
    body = {"model": MODEL, "prompt": "x =", "max_tokens": 4}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body} for number in range(3)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def files() -> None:
    data = batch_lines()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "lines.jsonl", "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert file.id in [each.id for each in client.files.list(limit=1)]
    assert client.files.wait_for_processing(file.id).id == file.id
    assert client.files.delete(file.id).deleted


def batches() -> None:
    file = client.files.create(file=("lines.jsonl", batch_lines()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "me"}
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.metadata) == ("completed", 3, {"of": "me"})
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {line["custom_id"] for line in output} == {"line-0", "line-1", "line-2"}
    assert all(line["response"]["body"]["object"] == "text_completion" for line in output)
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    try:
        client.batches.cancel(batch.id)
    except openai.BadRequestError:
        pass
    else:
        raise AssertionError("a batch that has ended was cancelled")


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


def errors() -> None:
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was taken")
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 100_000}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a prompt without end was taken")


def response() -> None:
    first = client.responses.create(model=MODEL, input="hello", max_output_tokens=8)
    assert first.output_text
    second = client.responses.create(model=MODEL, input="again", max_output_tokens=8, previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)


def streamed_response() -> None:
    with client.responses.stream(model=MODEL, input="hello", max_output_tokens=8) as events:
        kinds = [event.type for event in events]
    assert (kinds[0], "response.output_text.delta" in kinds) == ("response.created", True)


def parsed_response() -> None:
    parsed = client.responses.parse(model=MODEL, input="somebody", max_output_tokens=400, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


def response_tools() -> None:
    answer = client.responses.create(
        model=MODEL,
        input="somebody",
        max_output_tokens=400,
        tools=[RESPONSE_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    check_person(json.loads(calls[0].arguments))
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "stored"}
    assert client.responses.create(
        model=MODEL, input=[result], max_output_tokens=8, previous_response_id=answer.id
    ).output_text


def background_response() -> None:
    job = client.responses.create(model=MODEL, input="hello", max_output_tokens=8, background=True)
    for _ in range(600):
        job = client.responses.retrieve(job.id)
        if job.status not in ("queued", "in_progress"):
            break
    assert job.output_text, job


def chat_reasoning() -> None:
    message = thinking.chat.completions.create(model=THINKING.model, messages=MESSAGES, max_tokens=8).choices[0].message
    assert message.reasoning_content
    assert not message.content
    chunks = thinking.chat.completions.create(model=THINKING.model, messages=MESSAGES, max_tokens=8, stream=True)
    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)


def response_reasoning() -> None:
    answer = thinking.responses.create(**THOUGHT)
    assert (answer.output[0].type, bool(answer.output[0].content[0].text)) == ("reasoning", True)
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def reasoning_summary() -> None:
    with thinking.responses.stream(**THOUGHT, reasoning={"summary": "auto"}) as events:
        told = list(events)
    [part] = told[-1].response.output[0].summary
    deltas = [event.delta for event in told if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == part.text != ""


def encrypted_reasoning() -> None:
    first = thinking.responses.create(**THOUGHT, store=False, include=["reasoning.encrypted_content"])
    [item] = first.output
    plain = {"type": "reasoning", "id": item.id, "summary": [], "content": [part.to_dict() for part in item.content]}
    sealed = {"type": "reasoning", "id": item.id, "summary": [], "encrypted_content": item.encrypted_content}
    before, after = {"role": "user", "content": "hello"}, {"role": "user", "content": "again"}
    counts = [
        thinking.responses.input_tokens.count(model=THINKING.model, input=[before, *items, after]).input_tokens
        for items in ([plain], [sealed])
    ]
    assert counts[0] == counts[1]
    assert thinking.responses.create(**THOUGHT | {"input": [before, sealed, after], "store": False}).output


def resumed_stream() -> None:
    stream = client.responses.create(model=MODEL, input="hello", max_output_tokens=100, background=True, stream=True)
    events = [event for event, _ in zip(stream, range(4), strict=False)]
    stream.close()
    response_id = events[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number))
    told = [*events, *rest]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert told[-1].type in ("response.completed", "response.incomplete")
    assert [event.to_dict() for event in client.responses.retrieve(response_id, stream=True)] == [
        event.to_dict() for event in told
    ]
    last = told[-1].sequence_number
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=last)) == []


def resumed_chat_stream() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "stream": True}
    options = {"include_usage": True, "resumable": True}
    raw = client.chat.completions.with_raw_response.create(**asked, stream_options=options)
    stream_id, stream = raw.headers["x-request-id"], raw.parse()
    read = [chunk for chunk, _ in zip(stream, range(4), strict=False)]
    stream.close()

    def told(**place: object) -> list[object]:
        chunks = client.get(
            f"/streams/{stream_id}",
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=openai.Stream[ChatCompletionChunk],
            options=place,
        )
        return [chunk.to_dict() for chunk in chunks]

    whole = told(params={"from": 0})
    assert whole[:4] == [chunk.to_dict() for chunk in read]
    assert whole[-1]["usage"]["completion_tokens"] > 0
    assert told(headers={"Last-Event-ID": "3"}) == whole[4:]


def repeated_request() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 1.0}
    once = {"Idempotency-Key": f"key-{time.monotonic_ns()}"}
    first, again = (client.chat.completions.create(**asked, extra_headers=once) for _ in range(2))
    assert first == again


def cancelled_stream() -> None:
    stream = client.responses.create(model=MODEL, input="hello", max_output_tokens=1000, background=True, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.created":
            client.responses.cancel(event.response.id)
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "cancelled")


def hosted_history() -> None:
    asked = {"role": "user", "content": "Who?"}
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "me"}
    # As the library's users send it on: the items themselves.
    history = [asked, *HOSTED, result, asked]
    answer = client.responses.create(model=MODEL, input=history, max_output_tokens=8, store=False)
    assert answer.output_text
    plain = client.responses.create(model=MODEL, input=[asked, asked], max_output_tokens=8, store=False)
    assert answer.usage.input_tokens > plain.usage.input_tokens + 50


def compaction() -> None:
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}, MESSAGES[0]]
    compacted = client.responses.compact(model=MODEL, input=asked, extra_body={"max_output_tokens": 16})
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    answer = client.responses.create(model=MODEL, input=[*compacted.output, MESSAGES[0]], max_output_tokens=8)
    assert answer.output_text
    history = [*asked, {"type": "compaction_trigger"}]
    [item] = client.responses.create(model=MODEL, input=history, max_output_tokens=16, store=False).output
    assert item.type == "compaction"


def records() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, max_tokens=200, response_format=Point)
    assert set(parsed.choices[0].message.parsed.places) <= {"x", "y"}
    parsed = client.responses.parse(model=MODEL, input="where", max_output_tokens=200, text_format=Point)
    assert set(parsed.output_parsed.places) <= {"x", "y"}


def tool_not_offered() -> None:
    messages: list[object] = list(MESSAGES)
    for _ in range(2):
        asked = {"model": CALLING.model, "messages": messages, "max_tokens": 50, "tools": [TOOL]}
        [choice] = calling.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls", choice
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("nobody", {"who": "me"})
        with calling.chat.completions.stream(**asked) as events:
            assert events.get_final_completion().choices[0].message.tool_calls[0].function.name == "nobody"
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "There is no such tool."}]
    answer = calling.responses.create(model=CALLING.model, input="hello", tools=[RESPONSE_TOOL | {"strict": False}])
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "nobody")]


def _strict(tool: dict[str, object]) -> dict[str, object]:
    return tool | {"function": {**tool["function"], "strict": True}}


def _looked(source: dict[str, str]) -> None:
    content = [{"type": "image_url", "image_url": source}, {"type": "text", "text": "Look"}]
    answer = seeing.chat.completions.create(
        model=SEEING.model, messages=[{"role": "user", "content": content}], max_tokens=4
    )
    assert answer.usage.prompt_tokens == NUM_SEEN, answer.usage


def images() -> None:
    _looked({"url": PICTURE_URL, "detail": "original"})


def file_images() -> None:
    file = seeing.files.create(file=("a.png", picture()), purpose="vision")
    _looked({"file_id": file.id})
    content = [{"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "Look"}]
    _answered(content)
    seeing.files.delete(file.id)


def response_images() -> None:
    _answered([{"type": "input_image", "image_url": PICTURE_URL}, {"type": "input_text", "text": "Look"}])


def _answered(content: list[dict[str, str]]) -> None:
    item = {"role": "user", "content": content}
    answer = seeing.responses.create(model=SEEING.model, input=[item], max_output_tokens=4)
    assert answer.usage.input_tokens == NUM_SEEN, answer.usage


def streamed_images() -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "Look"}]}
    usage = {"include_usage": True}
    asked = {"model": SEEING.model, "messages": [message], "max_tokens": 4, "stream": True, "stream_options": usage}
    *_, last = seeing.chat.completions.create(**asked)
    assert last.usage.prompt_tokens == NUM_SEEN, last.usage
    item = {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE_URL}]}
    item["content"].append({"type": "input_text", "text": "Look"})
    *_, end = seeing.responses.create(model=SEEING.model, input=[item], max_output_tokens=4, stream=True)
    assert end.response.usage.input_tokens == NUM_SEEN, end.response.usage


def result_images() -> None:
    output = [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": PICTURE_URL}]
    items = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c", "name": "person", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    asked = {"model": SEEING.model, "max_output_tokens": 4}
    seen = seeing.responses.create(**asked, input=items).usage.input_tokens
    items[2]["output"] = output[:1]
    assert seen == seeing.responses.create(**asked, input=items).usage.input_tokens + NUM_OF_PICTURE, seen


def batched_images() -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE_URL}]}
    item["content"].append({"type": "input_text", "text": "Look"})
    (answer,) = _batched(seeing, {"model": SEEING.model, "input": [item], "max_output_tokens": 4})
    assert answer["usage"]["input_tokens"] == NUM_SEEN, answer


def _batched(asking: openai.OpenAI, *bodies: dict[str, object]) -> list[dict[str, Any]]:
    """Return the answers to lines of `/v1/responses`, in their order."""
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body})
        for number, body in enumerate(bodies)
    ]
    file = asking.files.create(file=("a.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = asking.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.5)
        batch = asking.batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    answers = [json.loads(line) for line in asking.files.content(batch.output_file_id).text.splitlines()]
    return [each["response"]["body"] for each in sorted(answers, key=lambda each: int(each["custom_id"]))]


def truncation() -> None:
    context = client.models.retrieve(MODEL).to_dict()["max_model_len"]
    turn = {"role": "user", "content": "one two three four " * (context // 40)}
    asked = {"model": MODEL, "input": [turn] * 12, "truncation": "auto", "max_output_tokens": 4}
    try:
        client.responses.create(**asked | {"truncation": "disabled"})
        raise AssertionError("it is not too long")
    except openai.BadRequestError as error:
        assert (error.code, error.param) == ("context_length_exceeded", "input"), error
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        *_, end = stream
    (line,) = _batched(client, asked)
    counts = {whole.usage.input_tokens, end.response.usage.input_tokens, line["usage"]["input_tokens"]}
    assert len(counts) == 1, counts
    assert context // 2 < counts.pop() < context
    calls = [
        item
        for number in range(12)
        for item in (
            {"type": "function_call", "call_id": f"c{number}", "name": "person", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": turn["content"]},
        )
    ]
    agent = client.responses.create(**asked | {"input": [{"role": "user", "content": "hello"}, *calls]})
    assert context // 2 < agent.usage.input_tokens < context


run(
    {
        "chat": chat,
        "stream with usage": stream,
        "text completion": text,
        "choices and logprobs": choices_and_logprobs,
        "best_of": best_of,
        "stop": stop,
        "JSON object": json_object,
        "JSON schema": json_schema,
        "tool call": tool_call,
        "streamed tool call": streamed_tool_call,
        "loop of tool calls": tool_loop,
        "embeddings": embeddings,
        "files": files,
        "batches": batches,
        "models": models,
        "typed errors": errors,
        "Responses": response,
        "streamed Responses": streamed_response,
        "Responses with a schema": parsed_response,
        "Responses with tools": response_tools,
        "background Responses": background_response,
        "resumed streams": resumed_stream,
        "resumed chat streams": resumed_chat_stream,
        "requests repeated by their key": repeated_request,
        "cancelled streams": cancelled_stream,
        "reasoning in chat": chat_reasoning,
        "reasoning in Responses": response_reasoning,
        "reasoning as summaries": reasoning_summary,
        "encrypted reasoning": encrypted_reasoning,
        "history of the provider's own tools": hosted_history,
        "compaction": compaction,
        "records": records,
        "call of a tool that was not offered": tool_not_offered,
        "images": images,
        "images in Responses": response_images,
        "images of files": file_images,
        "streamed images": streamed_images,
        "images in results of tools": result_images,
        "images in batches": batched_images,
        "truncation": truncation,
    }
)
