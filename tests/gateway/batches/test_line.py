"""Lines of OpenAI's Batch API become jobs, and results lines of output, which the official SDK's models read."""

from __future__ import annotations

import json
import struct
import time
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from gateway.admission.caller import Caller
from gateway.api.large_bodies import LargeBodies
from gateway.api.model_fit import with_defaults
from gateway.api.output_reading import with_reading
from gateway.api.schemas.parsing import parse_chat
from gateway.batches.line import (
    BatchLine,
    line_of,
    parsed_line,
    read_openai_line,
    shortened,
    with_checked_grammar,
    with_model_reading,
)
from gateway.batches.line_answer import output_line
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from shared.errors import BadRequestError
from shared.messages import BatchResult
from shared.sampling import SamplingDefaults, with_advice
from tests.gateway.dispatch.test_inflight import fleet_load


def chat_line(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answered(line: BatchLine, **fields: Any) -> dict[str, Any]:
    for request in line.requests:
        result = BatchResult(
            id=request.id, model="m", tenant="default", text="", finish="stop", prompt_tokens=4, completion_tokens=3
        )
        line.results[request.id] = msgspec.structs.replace(result, **fields)
    assert line.is_complete
    return output_line(line)


def load_of(chat_format: str, num_workers: int = 1) -> FleetLoad:
    return msgspec.structs.replace(fleet_load(), num_workers=num_workers, chat_format=chat_format)


def test_best_answers_of_a_line_are_told_and_the_tokens_of_all_are_counted() -> None:
    line = read_openai_line(chat_line(n=2, best_of=4, temperature=1), "default", "batch")
    assert [request.sampling.logprobs for request in line.requests] == [0] * 4
    # By the sum the short one would be the best, and the one without a finite sum is the last.
    said = [("long", 6, -6.0), ("short", 1, -2.0), ("middling", 2, -3.0), ("never", 2, None)]
    for request, (text, num_tokens, total) in zip(line.requests, said, strict=True):
        result = BatchResult(
            id=request.id,
            model="m",
            tenant="default",
            text=text,
            finish="stop",
            prompt_tokens=4,
            completion_tokens=num_tokens,
            total_logprob=total,
        )
        line.results[request.id] = msgspec.json.decode(msgspec.json.encode(result), type=BatchResult)
    answer = ChatCompletion.model_validate(output_line(line)["response"]["body"], strict=True)
    assert [(each.index, each.message.content) for each in answer.choices] == [(0, "long"), (1, "middling")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 11)


def test_field_that_a_worker_blames_is_named_in_the_output() -> None:
    line = read_openai_line(chat_line(), "default", "batch")
    blame = {"error_param": "messages", "error_code": "context_length_exceeded"}
    error = answered(line, finish="failed", error="too long", **blame)["response"]["body"]["error"]
    assert (error["message"], error["param"], error["code"]) == ("too long", "messages", "context_length_exceeded")
    body = {"model": "m", "input": "hello", "instructions": "Be brief. " * 100}
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    error = answered(read_openai_line(fields, "default", "batch"), finish="failed", error="too long", **blame)
    assert error["response"]["body"]["error"]["param"] == "instructions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "/v1/rerank"}, "url has to be one of /v1/chat/completions, /v1/completions, /v1/responses"),
        ({"bodi": {}}, "'bodi' is not a field of a batch line"),
        ({"body": {"model": "m", "messages": [], "temprature": 1}}, "body: "),
        ({"body": chat_line(temprature=1)["body"]}, "Did you mean 'temperature'?"),
        ({"body": chat_line(logprobs=True)["body"]}, "'logprobs' is not kept in the results of batch jobs"),
        ({"body": chat_line(stream=True)["body"]}, "'stream' is not kept"),
        ({"body": chat_line(best_of=2, logprobs=True)["body"]}, "'logprobs' is not kept"),
    ],
)
def test_line_that_cannot_be_a_job_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_openai_line(chat_line() | change, "default", "batch")


@pytest.mark.parametrize("missing", ["custom_id", "body", "url"])
def test_line_that_lacks_a_field_is_refused(missing: str) -> None:
    line = chat_line()
    del line[missing]
    with pytest.raises(BadRequestError, match=missing):
        read_openai_line(line, "default", "batch")


def test_what_a_body_leaves_out_is_left_to_the_model() -> None:
    every = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert read_openai_line(chat_line(), "t", "batch").requests[0].left_out == every
    named = read_openai_line(chat_line(temperature=1, top_k=-1), "t", "batch").requests[0]
    assert named.left_out == ("top_p", "min_p", "repetition_penalty")
    advised = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    sampling = with_advice(named.sampling, named.left_out, advised)
    at_the_gateway = with_defaults(parse_chat(json.dumps(chat_line(temperature=1, top_k=-1)["body"]).encode()), advised)
    assert msgspec.structs.replace(sampling, seed=0) == msgspec.structs.replace(at_the_gateway.sampling, seed=0)


def test_job_has_a_deadline_only_where_its_body_has_a_timeout() -> None:
    (without,), (within,) = (
        read_openai_line(line, "t", "batch").requests for line in (chat_line(), chat_line("b", timeout=30.0))
    )
    assert without.deadline is None
    assert within.deadline == pytest.approx(within.created + 30.0)


def test_reasoning_is_told_apart_as_the_worker_s_format_says() -> None:
    output = answered(
        read_openai_line(chat_line(), "default", "batch"),
        text="hm</think>yes",
        in_reasoning=True,
        chat_format="thinking",
    )
    message = output["response"]["body"]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    ChatCompletion.model_validate(output["response"]["body"])


def test_reasoning_of_a_line_is_counted_by_its_share_of_the_text() -> None:
    output = answered(
        read_openai_line(chat_line(n=2), "t", "b"), text="hm</think>", in_reasoning=True, chat_format="thinking"
    )
    details = ChatCompletion.model_validate(output["response"]["body"]).usage.completion_tokens_details  # type: ignore[union-attr]
    assert details is not None
    # Of each choice: three tokens wrote ten characters, two of which are thought.
    assert details.reasoning_tokens == 2


def test_reasoning_of_answers_that_are_not_returned_is_counted_as_their_tokens_are() -> None:
    line = read_openai_line(chat_line(n=1, best_of=2, temperature=1), "t", "b")
    thought = {"text": "hm</think>", "in_reasoning": True, "chat_format": "thinking", "total_logprob": -1.0}
    usage = ChatCompletion.model_validate(answered(line, **thought)["response"]["body"]).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (6, 2)


def line_of_model(generation: Generation) -> BatchLine:
    return line_of("a", generation, Caller("", "t", (), b"", "a"), "batch").without_prompts()


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
async def test_result_is_read_in_the_format_that_it_was_written_in_whatever_an_alias_means_by_now(url: str) -> None:
    body = chat_line()["body"] if url == "/v1/chat/completions" else {"model": "m", "input": "hello"}
    asked = chat_line() | {"url": url, "body": body}
    for now, then, content in (("plain", "thinking", "yes"), ("thinking", "plain", "<think>hm</think>yes")):
        generation = await with_model_reading(parsed_line(asked)[1], load_of(now), LargeBodies(), "t")
        told = {"text": "<think>hm</think>yes", "chat_format": then}
        answer = answered(line_of_model(generation), **told)["response"]["body"]
        if url == "/v1/responses":
            written = Response.model_validate_json(msgspec.json.encode(answer)).output_text
        else:
            written = answer["choices"][0]["message"]["content"]
        assert written == content


@pytest.mark.parametrize("strict", [True, False])
async def test_calls_are_read_alike_whether_their_format_was_known_before_or_the_result_says_it(strict: bool) -> None:
    function = {"name": "f", "strict": strict, "parameters": {"type": "object", "additionalProperties": False}}
    generation = parsed_line(chat_line(tools=[{"type": "function", "function": function}]))[1]
    known = await with_model_reading(generation, load_of("hermes"), LargeBodies(), "t")
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    before, after = (
        answered(line_of_model(each), text=call, chat_format="hermes")["response"]["body"]["choices"][0]["message"]
        for each in (known, generation)
    )
    assert before == after
    # A grammar keeps the model from calling another tool: this is what it has said.
    assert bool(after.get("tool_calls")) != strict


async def test_answer_to_a_line_with_a_chat_template_of_its_own_is_read_as_that_writes() -> None:
    template = "<tool_call> <tools> {{ messages }}"
    body = {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template": template}
    generation = parsed_line(chat_line(**body))[1]
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    line = line_of_model(await with_model_reading(generation, load_of("plain"), LargeBodies(), "t"))
    choice = answered(line, text=call, chat_format="plain")["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


def test_calls_of_tools_are_told_as_the_endpoint_tells_them() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    told = {"text": f"{call}\n{call}", "chat_format": "hermes"}
    tools = {"tools": [{"type": "function", "function": function}]}
    line = read_openai_line(chat_line(**tools), "t", "batch")
    output = answered(line, **told)
    choice = ChatCompletion.model_validate(output["response"]["body"]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [("f", {"a": 1})] * 2  # type: ignore[union-attr]
    # Each has an id of its own, the same one whenever the line is written.
    assert len({each.id for each in calls}) == 2
    assert output_line(line) == output
    one = answered(read_openai_line(chat_line(**tools, parallel_tool_calls=False), "t", "batch"), **told)
    assert len(one["response"]["body"]["choices"][0]["message"]["tool_calls"]) == 1
    older = answered(read_openai_line(chat_line(functions=[function]), "t", "batch"), **told)["response"]["body"]
    assert older["choices"][0]["finish_reason"] == "function_call"
    assert older["choices"][0]["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    body = {"model": "m", "input": "hello", "tools": [{"type": "function", **function}]}
    fields = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}
    written = msgspec.json.encode(answered(read_openai_line(fields, "t", "batch"), **told)["response"]["body"])
    response = Response.model_validate_json(written)
    assert [each.type for each in response.output] == ["function_call"] * 2


async def test_line_is_constrained_and_read_as_its_model_writes() -> None:
    bodies = LargeBodies()
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    generation = parsed_line(chat_line(response_format=schema))[1]
    asked = generation.sampling.grammar
    thinking = await with_model_reading(generation, load_of("hermes-thinking"), bodies, "t")
    # A model that thinks first could not, if the grammar of the answer held from the first token.
    assert thinking.sampling.grammar not in (None, asked)
    harmony = await with_model_reading(parsed_line(chat_line())[1], load_of("harmony"), bodies, "t")
    assert not harmony.sampling.skip_special_tokens
    # While no worker has told the format, or where it has nothing to read, a line stays as it is.
    for load in (None, load_of("", num_workers=0), load_of("plain")):
        assert await with_model_reading(generation, load, bodies, "t") is generation
    named = {"type": "function", "function": {"name": "f"}}
    called = parsed_line(chat_line(tools=[named], tool_choice=named))[1]
    assert (await with_model_reading(called, load_of("hermes"), bodies, "t")).sampling.grammar is not None
    with pytest.raises(BadRequestError, match="body: This model's chat template knows no calls of tools") as refused:
        await with_model_reading(called, load_of("plain"), bodies, "t")
    assert refused.value.param == "body.tool_choice"


async def test_grammars_of_lines_are_made_in_a_thread_so_that_streams_go_on() -> None:
    bodies: Any = Mock(in_thread=AsyncMock(side_effect=lambda tenant, work: work()))
    offered = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    for body, is_beside in (({}, False), (offered, True), ({"response_format": {"type": "json_object"}}, True)):
        bodies.in_thread.reset_mock()
        await with_model_reading(parsed_line(chat_line(**body))[1], load_of("hermes"), bodies, "t")
        assert bodies.in_thread.await_count == is_beside


@pytest.mark.parametrize("status", [400, 429, 501, 503])
async def test_line_whose_grammar_is_refused_is_refused_and_one_that_cannot_be_checked_now_waits(status: int) -> None:
    error = ApiError(status, "no", param="tools", code="bad")
    grammars: Any = Mock(checked=AsyncMock(side_effect=error))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    generation = parsed_line(chat_line(tools=tools, tool_choice="required"))[1]
    generation = await with_model_reading(generation, load_of("hermes"), LargeBodies(), "t")
    assert generation.looser_grammar is not None
    checked = with_checked_grammar(generation, grammars, "t")
    if status == 501:
        assert (await checked).sampling.grammar == generation.looser_grammar
    else:
        with pytest.raises(BadRequestError if status == 400 else ApiError, match="no"):
            await checked


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_are_told_as_embeddings(encoding: str) -> None:
    body = {"model": "m", "input": ["a", "b"], "encoding_format": encoding}
    fields = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    output = answered(read_openai_line(fields, "default", "batch"), vector=struct.pack("<2f", 0.5, -2.0))
    data = output["response"]["body"]["data"]
    if encoding == "float":
        parsed = CreateEmbeddingResponse.model_validate(json.loads(json.dumps(output["response"]["body"])))
        assert [vector.embedding for vector in parsed.data] == [[0.5, -2.0]] * 2
    else:
        assert [vector["embedding"] for vector in data] == ["AAAAPwAAAMA="] * 2
    assert output["response"]["body"]["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("chat_format", "call"), [("mistral", "[TOOL_CALLS]f[ARGS]{}"), ("glm", "<tool_call>f\n</tool_call>")]
)
def test_time_to_read_calls_grows_with_their_number_and_not_with_its_square(chat_format: str, call: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    line = read_openai_line(chat_line(tools=[tool]), "default", "batch")
    line.generation = with_reading(line.generation, chat_format)
    times = []
    for number in (500, 4000):
        began = time.thread_time()
        output = answered(line, text=call * number, chat_format=chat_format)
        times.append(time.thread_time() - began)
        assert len(output["response"]["body"]["choices"][0]["message"]["tool_calls"]) == number
    assert times[1] < 24 * times[0]


def test_time_to_make_a_line_grows_with_its_inputs_and_not_with_their_square() -> None:
    times = []
    for number in (256, 2048):
        body = {"model": "m", "input": ["a"] * number}
        fields = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
        custom_id, generation = parsed_line(fields)
        began = time.thread_time()
        line = line_of(custom_id, generation, Caller("", "default", (), b"", "a"), "batch-1", deadline=9.0, now=1.0)
        times.append(time.thread_time() - began)
        assert [request.id for request in line.requests] == [f"batch-1-{index}" for index in range(number)]
    assert times[1] < 24 * times[0]


async def test_line_that_is_not_to_be_shortened_waits_for_no_worker_to_count_its_tokens() -> None:
    _, generation = parsed_line(chat_line())
    assert await shortened(generation, None, AsyncMock()) is generation
