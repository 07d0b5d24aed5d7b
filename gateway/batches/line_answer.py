"""The output of a line of a batch: its results as the endpoint answers, or an error."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gateway.api.answer import AnswerStamp
from gateway.api.chat_answers import (
    AnswerIdentity,
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    CompletionChoice,
    ToolCallAnswer,
    finish_reason,
    usage_answer,
)
from gateway.api.details import likeliest
from gateway.api.output_reading import (
    NO_TOOLS,
    image_places,
    naming_conversation,
    naming_field,
    naming_image,
    reading_of,
)
from gateway.api.usage import UsageTotals
from gateway.batches.line import BatchLine
from gateway.errors import ApiError
from gateway.generation import PLAIN_READING, Generation, OutputReading
from gateway.pooling.parsing import EmbeddingsRequest
from gateway.responses.draft import ResponseGeneration
from gateway.responses.job import BackgroundJob
from gateway.responses.log import ResponseRecord
from gateway.responses.output import ResponseOutput
from gateway.responses.store import ended_response, read_result
from shared.formats import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart, format_named
from shared.messages import BatchResult, Usage

AnyGeneration = TypeVar("AnyGeneration", bound=Generation)


def output_line(line: BatchLine) -> dict[str, Any]:
    """Return a line of OpenAI's output file: an answer as the endpoint gives it, or an error."""
    results = [line.results[request.id] for request in line.requests]
    output: dict[str, Any] = {"id": line.requests[0].id.rpartition("-")[0], "custom_id": line.custom_id}
    failed = next((result for result in results if result.finish not in ("stop", "length")), None)
    if failed is not None and failed.finish != "failed":
        message = failed.error or f"The request was {failed.finish} before it was answered."
        return {**output, "response": None, "error": {"code": f"batch_{failed.finish}", "message": message}}
    if failed is None:
        status, body = 200, _answer(line, results)
    else:
        status, body = 400, json.loads(_refusal(line.generation, failed).body())
    return {**output, "response": {"status_code": status, "request_id": output["id"], "body": body}, "error": None}


@dataclass(frozen=True, slots=True)
class WrittenLine:
    """A line of an output file as it is written.

    Attributes:
        is_answer: Its file is that of the answers, not that of the errors.
        reasoning_tokens: Those of the answer.
    """

    data: bytes
    is_answer: bool
    reasoning_tokens: int


def written_line(line: BatchLine) -> WrittenLine:
    """Return the line of output of a complete line. It may take seconds, and runs in any thread."""
    output = output_line(line)
    response = output["response"]
    is_answer = response is not None and response["status_code"] == 200
    reasoning_tokens = reasoning_tokens_of(response["body"]) if is_answer else 0
    if is_answer and line.generation.pooling is not None:
        # One after the other: no other thread runs while all of them are encoded.
        for item in response["body"]["data"]:
            item["embedding"] = msgspec.Raw(msgspec.json.encode(item["embedding"]))
    return WrittenLine(msgspec.json.encode(output), is_answer, reasoning_tokens)


def reasoning_tokens_of(answer: dict[str, Any]) -> int:
    """Return how many tokens of an answer were reasoning."""
    usage: dict[str, Any] = msgspec.to_builtins(answer["usage"])
    details = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return int(details.get("reasoning_tokens", 0))


def _answer(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    if line.generation.pooling is not None:
        return _vectors(line, results)
    if isinstance(line.generation, ResponseGeneration):
        return _stored_response(line, line.generation, results[0])
    return _texts(line, results)


def _stored_response(line: BatchLine, generation: ResponseGeneration, result: BatchResult) -> dict[str, Any]:
    job = BackgroundJob.of(_as_written(generation, line.own_format, result), stream_seq=0, deadline=0.0)
    record = ResponseRecord(result.tenant, generation.name, generation.draft, b"", job)
    output = ResponseOutput(generation.draft)
    return ended_response(record, result, read_result(record, result, output), output)


def _refusal(generation: Generation, failed: BatchResult) -> ApiError:
    """Return the endpoint's error, with the field at fault if the worker names it."""
    code, message = failed.error_code or "invalid_value", failed.error or "The request failed."
    asked = generation.structured_output
    error = ApiError(400, message, param=failed.error_param, code=code)
    error = naming_image(naming_field(error, asked.field if asked else "tools"), image_places(generation))
    return naming_conversation(error, generation.conversation_field)


def _texts(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    generation, is_chat = line.generation, line.generation.kind == "chat"
    totals = UsageTotals(generation.n)
    for place, result in enumerate(results):
        counts = result.prompt_tokens, result.completion_tokens, result.cached_tokens
        totals.add(place, Usage(*counts, evicted_tokens=result.evicted_tokens, evicted_by=result.evicted_by))
    returned = list(range(len(results)))
    if generation.ranking is not None:
        returned = list(likeliest(list(map(_mean, results)), generation.n, generation.num_choices))
    # The tokens of all are counted, also of those that are not returned.
    read = [_read(line, result) for result in results] if is_chat else []
    totals.reasoning_tokens = sum(text.reasoning_tokens for text in read)
    created = int(max(result.completed for result in results))
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    stamp = AnswerStamp(results[0].id, created)
    identity = AnswerIdentity(prefix + stamp.token, generation.kind, generation.name, created, stamp=stamp)
    choices: list[ChatChoice | CompletionChoice] = []
    for index, place in enumerate(returned):
        result = results[place]
        if is_chat:
            choices.append(_chat_choice(identity, read[place], result, index))
        else:
            choices.append(CompletionChoice(index, result.text, None, finish_reason(result.finish, 0, False)))
    answer: dict[str, Any] = msgspec.to_builtins(identity.whole(choices, usage_answer(totals)))
    return answer


def _mean(result: BatchResult) -> float:
    """Return the mean log probability of a result's tokens, JSON's null as the least."""
    if not result.completion_tokens:
        return 0.0
    return -math.inf if result.total_logprob is None else result.total_logprob / result.completion_tokens


@dataclass(frozen=True, slots=True)
class _ReadText:
    """The text of a result as it is read.

    Attributes:
        reasoning_tokens: Estimated from their share of the text.
    """

    reading: OutputReading
    events: list[OutputEvent]
    reasoning: str
    reasoning_tokens: int


def _read(line: BatchLine, result: BatchResult) -> _ReadText:
    reading = _as_written(line.generation, line.own_format, result).reading or PLAIN_READING
    reader = reading.new_reader(result.in_reasoning)
    events = [*reader.feed(result.text), *reader.finish(is_cut=result.finish == "length")]
    reasoning = _text(events, ReasoningText)
    num_tokens = round(result.completion_tokens * len(reasoning) / len(result.text)) if reasoning else 0
    return _ReadText(reading, events, reasoning, num_tokens)


def _chat_choice(identity: AnswerIdentity, read: _ReadText, result: BatchResult, index: int) -> ChatChoice:
    reading, events, reasoning = read.reading, read.events, read.reasoning
    arguments = defaultdict[int, list[str]](list)
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
    calls = [
        CalledFunction(event.name, "".join(arguments[event.index]))
        for event in events
        if isinstance(event, ToolCallStart) and reading.includes_call(event.index)
    ]
    content = _text(events, ContentText)
    message = AssistantMessage("assistant", None if calls and not content else content)
    if reasoning and reading.includes_reasoning:
        message.reasoning_content = message.reasoning = reasoning
    if calls and reading.is_function_call:
        message.function_call = calls[0]
    elif calls:
        message.tool_calls = [
            ToolCallAnswer(identity.call_id(index, number), "function", call) for number, call in enumerate(calls)
        ]
    return ChatChoice(index, message, None, finish_reason(result.finish, len(calls), reading.is_function_call))


def _as_written(generation: AnyGeneration, own_format: str | None, result: BatchResult) -> AnyGeneration:
    """Return a line's generation with the reading of the format in which its worker says that it has written.

    That of the line's model may be another: an alias was moved meanwhile, or no worker had said it.
    """
    name = own_format or result.chat_format
    if not name or (generation.reading is not None and generation.reading.format_name == name):
        return generation
    chosen, use, asked = format_named(name), generation.tools or NO_TOOLS, generation.structured_output
    if not (use.tools or chosen.has_reasoning):
        return msgspec.structs.replace(generation, reading=None)
    if use.tools and chosen.constrains(use.tools, use.choice, None if asked is None else asked.grammar):
        use = dataclasses.replace(use, is_exclusive=True)
        generation = msgspec.structs.replace(generation, tools=use)
    reading = reading_of(name, use, generation.includes_reasoning)
    return msgspec.structs.replace(generation, reading=reading)


def _text(events: Iterable[OutputEvent], kind: type[ContentText | ReasoningText]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _vectors(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    is_base64 = isinstance(line.generation, EmbeddingsRequest) and line.generation.is_base64
    data = []
    for index, result in enumerate(results):
        vector = result.vector or b""
        written: Any = (
            base64.b64encode(vector).decode() if is_base64 else struct.unpack(f"<{len(vector) // 4}f", vector)
        )
        data.append({"object": "embedding", "index": index, "embedding": written})
    num_tokens = sum(result.prompt_tokens for result in results)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": line.generation.name, "usage": usage}
