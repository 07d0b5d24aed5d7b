"""The output of a line of a batch: its results as the endpoint answers, or an error."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable
from typing import Any

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
from gateway.api.output_reading import NO_TOOLS, image_places, naming_field, naming_image, reading_of
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
from shared.formats import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from shared.messages import BatchResult, Usage


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


def reasoning_tokens_of(answer: dict[str, Any]) -> int:
    """Return how many tokens of an answer were reasoning."""
    usage: dict[str, Any] = msgspec.to_builtins(answer["usage"])
    details = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return int(details.get("reasoning_tokens", 0))


def _answer(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    if line.generation.pooling is not None:
        return _vectors(line, results)
    if isinstance(line.generation, ResponseGeneration):
        return _stored_response(line.generation, results[0])
    return _texts(line, results)


def _stored_response(generation: ResponseGeneration, result: BatchResult) -> dict[str, Any]:
    job = BackgroundJob.of(generation, stream_seq=0, deadline=0.0)
    if job.chat_format is None:
        job = msgspec.structs.replace(job, chat_format=result.chat_format or None)
    record = ResponseRecord(result.tenant, generation.name, generation.draft, b"", job)
    output = ResponseOutput(generation.draft)
    return ended_response(record, result, read_result(record, result, output), output)


def _refusal(generation: Generation, failed: BatchResult) -> ApiError:
    """Return the endpoint's error, with the field at fault if the worker names it."""
    code, message = failed.error_code or "invalid_value", failed.error or "The request failed."
    asked = generation.structured_output
    error = ApiError(400, message, param=failed.error_param, code=code)
    return naming_image(naming_field(error, asked.field if asked else "tools"), image_places(generation))


def _texts(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    generation = line.generation
    totals = UsageTotals(generation.n)
    for place, result in enumerate(results):
        counts = result.prompt_tokens, result.completion_tokens, result.cached_tokens
        totals.add(place, Usage(*counts, evicted_tokens=result.evicted_tokens, evicted_by=result.evicted_by))
    returned = results
    if generation.ranking is not None:
        places = likeliest(list(map(_mean, results)), generation.n, generation.num_choices)
        returned = [results[place] for place in places]
    created = int(max(result.completed for result in results))
    prefix = "chatcmpl-" if generation.kind == "chat" else "cmpl-"
    stamp = AnswerStamp(results[0].id, created)
    identity = AnswerIdentity(prefix + stamp.token, generation.kind, generation.name, created, stamp=stamp)
    choices: list[ChatChoice | CompletionChoice] = []
    for index, result in enumerate(returned):
        if generation.kind == "chat":
            choices.append(_chat_choice(identity, generation, result, index, totals))
        else:
            choices.append(CompletionChoice(index, result.text, None, finish_reason(result.finish, 0, False)))
    answer: dict[str, Any] = msgspec.to_builtins(identity.whole(choices, usage_answer(totals)))
    return answer


def _mean(result: BatchResult) -> float:
    """Return the mean log probability of a result's tokens, JSON's null as the least."""
    if not result.completion_tokens:
        return 0.0
    return -math.inf if result.total_logprob is None else result.total_logprob / result.completion_tokens


def _chat_choice(
    identity: AnswerIdentity, generation: Generation, result: BatchResult, index: int, totals: UsageTotals
) -> ChatChoice:
    """Return a choice; its tokens of reasoning are added to `totals`, estimated from their share of the text."""
    reading = _reading(generation, result)
    reader = reading.new_reader(result.in_reasoning)
    events = [*reader.feed(result.text), *reader.finish()]
    reasoning = _text(events, ReasoningText)
    if reasoning:
        totals.reasoning_tokens += round(result.completion_tokens * len(reasoning) / len(result.text))
    calls = [
        CalledFunction(event.name, _text((each for each in events if _is_of(each, event.index)), ToolCallArguments))
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


def _reading(generation: Generation, result: BatchResult) -> OutputReading:
    """Return how a text is read: as its grammar was made, or as its worker says where none had said it before."""
    if generation.reading is not None:
        return generation.reading
    if not result.chat_format:
        return PLAIN_READING
    return reading_of(result.chat_format, generation.tools or NO_TOOLS, generation.includes_reasoning)


def _text(events: Iterable[OutputEvent], kind: type[ContentText | ReasoningText | ToolCallArguments]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _is_of(event: OutputEvent, call: int) -> bool:
    return isinstance(event, ToolCallArguments) and event.index == call


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
