"""Lines of OpenAI's Batch API: they become jobs of the batch lane, and results become lines of output.

A line is `{"custom_id", "method", "url", "body"}`. A body is read by the very code that reads it at the gateway. What a
stored result does not hold (log probabilities, calls of tools) is refused and not left out.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.admission.caller import Caller
from gateway.api.chat_answers import (
    AnswerIdentity,
    AssistantMessage,
    ChatChoice,
    CompletionChoice,
    finish_reason,
    usage_answer,
)
from gateway.api.details import likeliest
from gateway.api.model_fit import check_watermark, with_watermark
from gateway.api.output_reading import NO_TOOLS, image_places, naming_field, naming_image, reading_of
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.sequences import wire_requests
from gateway.api.usage import UsageTotals
from gateway.errors import ApiError
from gateway.generation import PLAIN_READING, Generation
from gateway.media.intake import ImageIntake
from gateway.pooling.parsing import EmbeddingsRequest, parse_embeddings
from gateway.responses.draft import ResponseGeneration
from gateway.responses.job import BackgroundJob
from gateway.responses.log import ResponseRecord
from gateway.responses.output import ResponseOutput
from gateway.responses.request import own_items, parse_body, to_generation
from gateway.responses.store import ended_response, read_result
from shared.errors import BadRequestError
from shared.formats import ContentText, ReasoningText
from shared.messages import BatchResult, Request, Usage

MAX_ID_CHARACTERS = 256
"""Of a `custom_id`."""


def _parse_response(body: bytes) -> ResponseGeneration:
    """Return a response that stands alone and is kept nowhere but in the line of output."""
    parsed = parse_body(body)
    if parsed.previous_response_id is not None:
        message = "A line of a batch continues no stored response: put the whole conversation into 'input'."
        raise ApiError(400, message, param="previous_response_id", code="unsupported_parameter")
    if parsed.background:
        message = "A line of a batch is computed in the background anyway. Leave 'background' out."
        raise ApiError(400, message, param="background", code="unsupported_parameter")
    items = own_items(parsed)
    for index, item in enumerate(items):
        if item.type in ("item_reference", "compaction", "compaction_trigger"):
            message = f"Items of the type '{item.type}' refer to stored items, which batch lines cannot read."
            raise ApiError(400, message, param=f"input.[{index}].type", code="unsupported_parameter")
    generation = to_generation(parsed, [], items, ())
    draft = generation.draft
    if draft.has_encrypted_reasoning:
        message = "Reasoning is not encrypted in lines of a batch. Leave it out of 'include'."
        raise ApiError(400, message, param="include", code="unsupported_parameter")
    return msgspec.structs.replace(generation, draft=msgspec.structs.replace(draft, is_stored=False, input=[]))


PARSERS: MappingProxyType[str, Callable[[bytes], Generation]] = MappingProxyType(
    {
        "/v1/chat/completions": parse_chat,
        "/v1/completions": parse_completion,
        "/v1/responses": _parse_response,
        "/v1/embeddings": parse_embeddings,
    }
)
_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(slots=True)
class BatchLine:
    """One line: its generation, the jobs that compute it, and their results by job id, as they arrive."""

    custom_id: str
    generation: Generation
    requests: list[Request]
    results: dict[str, BatchResult] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all results have come."""
        return len(self.results) == len(self.requests)

    def without_prompts(self) -> BatchLine:
        """Return a copy to keep once the jobs are published: their ids and images, and how to write the answer."""
        requests = [
            Request(id=each.id, model=each.model, tenant=each.tenant, lane="batch", media=each.media)
            for each in self.requests
        ]
        return BatchLine(self.custom_id, msgspec.structs.replace(self.generation, prompts=()), requests, self.results)

    def usage(self) -> Usage:
        """Return the tokens of all results; those of a prompt with several choices count once for each."""
        results = self.results.values()
        return Usage(
            sum(each.prompt_tokens for each in results),
            sum(each.completion_tokens for each in results),
            sum(each.cached_tokens for each in results),
        )


def read_openai_line(
    fields: dict[str, Any],
    tenant: str,
    prefix: str,
    *,
    deadline: float | None = None,
    now: float | None = None,
    watermark: str | None = None,
    key: str = "",
    weight: float = 1.0,
    settled: Callable[[Generation], Generation] = lambda generation: generation,
) -> BatchLine:
    """Return the jobs of a line; a bad line is a `BadRequestError` that names the field.

    Args:
        fields: The line.
        tenant: Whose jobs these are.
        prefix: Of the jobs' ids, unique within the tenant.
        deadline: Unix seconds; None leaves it to the body.
        now: Unix seconds at the server; this machine's if not given.
        watermark: The secret by which answers to the key are marked, if they are.
        key: Of whom they are within the tenant: keys are served in turns.
        weight: Of the key.
        settled: Replaces an alias by its model, and finds its adapter; its errors propagate.
    """
    if strange := sorted(fields.keys() - _KEYS):
        known = ", ".join(sorted(_KEYS))
        message = f"{strange[0][:64]!r} is not a field of a batch line; those are {known}"
        raise BadRequestError(message, strange[0][:64], "unknown_parameter")
    custom_id, body, url = checked_id(fields), fields.get("body"), fields.get("url")
    if not isinstance(body, dict):
        raise BadRequestError("body has to be an object", "body", "invalid_request")
    if fields.get("method", "POST") != "POST":
        raise BadRequestError("method has to be POST", "method", "invalid_method")
    if not isinstance(url, str) or url not in PARSERS:
        raise BadRequestError(f"url has to be one of {', '.join(PARSERS)}", "url", "invalid_url")
    try:
        generation = with_watermark(settled(PARSERS[url](json.dumps(body).encode())), watermark)
        check_watermark(generation)
    except ApiError as error:
        param = "body" if error.param is None else f"body.{error.param}"
        raise BadRequestError(f"body: {error.message}", param, error.code or "invalid_value") from None
    _check_is_kept(generation)
    # A job without a deadline waits until a worker takes it.
    caller = Caller(key, tenant, (), b"", custom_id[:256], weight=weight)
    requests = wire_requests(generation, caller, "", generation.timeout_s, now)
    for index, request in enumerate(requests):
        job: dict[str, Any] = {"id": f"{prefix}-{index}", "lane": "batch", "reply": None, "trace": None}
        # The worker that takes it knows what its model's files advise.
        job |= {"left_out": generation.left_out}
        if generation.has_images or generation.sampling.watermark:
            # It is sent as JSON, and a worker of an earlier version would refuse a field that it does not know.
            job |= {"cache_hints": None}
        if deadline is not None:
            job |= {"deadline": min(deadline, request.deadline or deadline)}
        requests[index] = msgspec.structs.replace(request, **job)
    return BatchLine(custom_id, generation, requests)


async def with_images(line: BatchLine, images: ImageIntake, tenant: str) -> BatchLine:
    """Return a line whose images are stored; `ApiError` 400 for a bad one, 429 or 503 if it cannot be stored."""
    generation = line.generation
    if not generation.has_images:
        return line
    generation = await images.stored(msgspec.structs.replace(generation, lane="batch"), tenant)
    media = [prompt.media for prompt in generation.prompts for _ in range(generation.n)]
    requests = [msgspec.structs.replace(each, media=own) for each, own in zip(line.requests, media, strict=True)]
    return BatchLine(line.custom_id, generation, requests, line.results)


def checked_id(fields: dict[str, Any]) -> str:
    """Return the `custom_id` of a line; raise `BadRequestError` if it has none."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequestError("custom_id has to be a text", "custom_id", "invalid_custom_id")
    if len(custom_id) > MAX_ID_CHARACTERS:
        message = f"custom_id has to have {MAX_ID_CHARACTERS} characters at most"
        raise BadRequestError(message, "custom_id", "invalid_custom_id")
    return custom_id


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


def _answer(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    if line.generation.pooling is not None:
        return _vectors(line, results)
    if isinstance(line.generation, ResponseGeneration):
        return _stored_response(line.generation, results[0])
    return _texts(line, results)


def _stored_response(generation: ResponseGeneration, result: BatchResult) -> dict[str, Any]:
    shown = generation.includes_reasoning
    job = BackgroundJob(stream_seq=0, deadline=0.0, chat_format=result.chat_format or None, includes_reasoning=shown)
    record = ResponseRecord(result.tenant, generation.name, generation.draft, b"", job)
    output = ResponseOutput(generation.draft)
    return ended_response(record, result, read_result(record, result, output), output)


def _refusal(generation: Generation, failed: BatchResult) -> ApiError:
    """Return the endpoint's error, with the field at fault if the worker names it."""
    code, message = failed.error_code or "invalid_value", failed.error or "The request failed."
    asked = generation.structured_output
    error = ApiError(400, message, param=failed.error_param, code=code)
    return naming_image(naming_field(error, asked.field if asked else "tools"), image_places(generation))


def _check_is_kept(generation: Generation) -> None:
    sampling, ranking = generation.sampling, generation.ranking
    shows_logprobs = sampling.logprobs is not None if ranking is None else ranking.shows_logprobs
    problems = {
        "tools": generation.tools is not None,
        "stream": generation.stream,
        "logprobs": shows_logprobs or sampling.prompt_logprobs is not None,
        "return_token_ids": generation.details is not None and generation.details.token_ids,
    }
    for name, is_asked in problems.items():
        if is_asked:
            message = f"body: {name!r} is not kept in the results of batch jobs; leave it out"
            raise BadRequestError(message, f"body.{name}", "unsupported_parameter")


def _texts(line: BatchLine, results: list[BatchResult]) -> dict[str, Any]:
    generation = line.generation
    totals = UsageTotals(generation.n)
    for place, result in enumerate(results):
        counts = result.prompt_tokens, result.completion_tokens, result.cached_tokens
        totals.add(place, Usage(*counts, evicted_tokens=result.evicted_tokens, evicted_by=result.evicted_by))
    choices: list[ChatChoice | CompletionChoice] = []
    returned = results
    if generation.ranking is not None:
        places = likeliest(list(map(_mean, results)), generation.n, generation.num_choices)
        returned = [results[place] for place in places]
    for index, result in enumerate(returned):
        reason = finish_reason(result.finish, 0, is_function_call=False)
        if generation.kind == "chat":
            choices.append(ChatChoice(index, _message(generation, result), None, reason))
        else:
            choices.append(CompletionChoice(index, result.text, None, reason))
    created = int(max(result.completed for result in results))
    prefix = "chatcmpl-" if generation.kind == "chat" else "cmpl-"
    identity = AnswerIdentity(prefix + results[0].id, generation.kind, generation.name, created)
    answer: dict[str, Any] = msgspec.to_builtins(identity.whole(choices, usage_answer(totals)))
    return answer


def _mean(result: BatchResult) -> float:
    """Return the mean log probability of a result's tokens, JSON's null as the least."""
    if not result.completion_tokens:
        return 0.0
    return -math.inf if result.total_logprob is None else result.total_logprob / result.completion_tokens


def _message(generation: Generation, result: BatchResult) -> AssistantMessage:
    reading = PLAIN_READING
    if result.chat_format:
        reading = reading_of(result.chat_format, NO_TOOLS, generation.includes_reasoning)
    reader = reading.new_reader(result.in_reasoning)
    events = [*reader.feed(result.text), *reader.finish()]
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    message = AssistantMessage("assistant", content)
    if reasoning and generation.includes_reasoning:
        message.reasoning_content = message.reasoning = reasoning
    return message


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
