"""Lines of OpenAI's Batch API become jobs of the batch lane.

A line is `{"custom_id", "method", "url", "body"}`. A body is read by the very code that reads it at the gateway. What a
stored result does not hold (log probabilities, token ids) is refused and not left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.admission.caller import Caller
from gateway.api.large_bodies import LargeBodies
from gateway.api.model_fit import check_watermark, with_watermark
from gateway.api.output_reading import StructuredOutputAdmission, naming_conversation, with_reading
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.sequences import wire_requests
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from gateway.media.intake import ImageIntake
from gateway.pooling.parsing import parse_embeddings
from gateway.responses.draft import ResponseGeneration
from gateway.responses.request import own_items, parse_body, to_generation
from gateway.responses.truncation import TokenCounter, Truncation
from shared.errors import BadRequestError
from shared.formats import detect_format
from shared.media_store import LINE_TTL_S
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
    """One line: its generation, the jobs that compute it, and their results by job id, as they arrive.

    Attributes:
        own_format: Name of the format of the chat template that it brings; None without, where results say the model's.
    """

    custom_id: str
    generation: Generation
    requests: list[Request]
    results: dict[str, BatchResult] = field(default_factory=dict)
    own_format: str | None = None

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
        generation = msgspec.structs.replace(self.generation, prompts=())
        return BatchLine(self.custom_id, generation, requests, self.results, self.own_format)

    @property
    def result_bytes(self) -> int:
        """Size of the results so far, about so."""
        return sum(len(each.text) + len(each.vector or b"") for each in self.results.values())

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
    watermark: str | None = None,
    settled: Callable[[Generation], Generation] = lambda generation: generation,
) -> BatchLine:
    """Return the jobs of a line, of whatever model; a bad line is a `BadRequestError` that names the field.

    Args:
        fields: The line.
        tenant: Whose jobs these are.
        prefix: Of the jobs' ids, unique within the tenant.
        watermark: The secret by which answers to the key are marked, if they are.
        settled: Replaces an alias by its model, and finds its adapter; its errors propagate.
    """
    custom_id, generation = parsed_line(fields)
    generation = fitted(generation, watermark, settled)
    return line_of(custom_id, generation, Caller("", tenant, (), b"", custom_id[:256]), prefix)


def parsed_line(fields: dict[str, Any]) -> tuple[str, Generation]:
    """Return the `custom_id` of a line and what its body asks for, whatever model it names."""
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
    with _about_the_body():
        generation = PARSERS[url](json.dumps(body).encode())
    _check_is_kept(generation)
    return custom_id, generation


def fitted(generation: Generation, watermark: str | None, settled: Callable[[Generation], Generation]) -> Generation:
    """Return a line's generation for the model that its name means, and with its key's watermark."""
    with _about_the_body():
        generation = with_watermark(settled(generation), watermark)
        check_watermark(generation)
    return generation


async def with_model_reading(
    generation: Generation, load: FleetLoad | None, bodies: LargeBodies, tenant: str
) -> Generation:
    """Return a line's generation as its model's chat format makes it, as of every other request.

    The grammar of its answer leaves room for reasoning, and marks of the format are left in the text. While no worker
    has reported the format it stays as it is, and the result says how it is read.
    """
    if load is None or not (load.num_workers or load.chat_format):
        return generation
    # Eight tools take 2 ms, and many lines are published at once: in a thread, streams go on meanwhile.
    has_grammar = generation.tools is not None or generation.sampling.grammar is not None
    make = partial(with_reading, generation, load.chat_format)
    with _about_the_body():
        return await bodies.in_thread(tenant, make) if has_grammar else make()


async def shortened(generation: Generation, load: FleetLoad | None, counter: TokenCounter) -> Generation:
    """Return a line's generation with as much of its conversation as fits, where the line asks for that.

    Raises:
        ApiError: No worker can count its tokens now.
        BadRequestError: The worker refuses the conversation.
    """
    if not isinstance(generation, ResponseGeneration) or not generation.may_truncate:
        return generation
    if load is None or not load.num_workers:
        raise ApiError(503, f"No worker of `{generation.model}` can count the tokens.", code="no_worker")
    truncation = Truncation(msgspec.structs.replace(generation, lane="batch"), load)
    try:
        return await truncation.truncated(counter) if truncation.is_needed else generation
    except ApiError as error:
        if error.status != 400:
            raise
        raise _of_the_body(naming_conversation(error, generation.conversation_field)) from None


async def with_checked_grammar(generation: Generation, grammars: StructuredOutputAdmission, tenant: str) -> Generation:
    """Return a line's generation with a grammar that can be compiled. Where this gateway checks none, the worker does.

    Raises:
        ApiError: 429 or 503, it cannot be checked now.
        BadRequestError: It cannot be compiled.
    """
    try:
        return await grammars.checked(generation, tenant)
    except ApiError as error:
        if error.status == 400:
            raise _of_the_body(error) from None
        if error.status != 501:
            raise
    grammar = generation.looser_grammar or generation.sampling.grammar
    return msgspec.structs.replace(generation, sampling=msgspec.structs.replace(generation.sampling, grammar=grammar))


@contextlib.contextmanager
def _about_the_body() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise _of_the_body(error) from None


def _of_the_body(error: ApiError) -> BadRequestError:
    """Return an endpoint's refusal of a body as one of the line that has it."""
    param = "body" if error.param is None else f"body.{error.param}"
    return BadRequestError(f"body: {error.message}", param, error.code or "invalid_value")


def line_of(
    custom_id: str,
    generation: Generation,
    caller: Caller,
    prefix: str,
    *,
    deadline: float | None = None,
    now: float | None = None,
) -> BatchLine:
    """Return the jobs that compute a line for a caller.

    Args:
        custom_id: The client's name of the line.
        generation: What it asks for.
        caller: The tenant and key that it is computed for: keys are served in turns.
        prefix: Of the jobs' ids, unique within the tenant.
        deadline: Unix seconds; None leaves it to the body.
        now: Unix seconds at the server; this machine's if not given.
    """
    # A job without a deadline waits until a worker takes it.
    requests = wire_requests(generation, caller, "", generation.timeout_s, now)
    # The worker that takes them knows what its model's files advise.
    job: dict[str, Any] = {"lane": "batch", "reply": None, "trace": None, "left_out": generation.left_out}
    if generation.has_images or generation.sampling.watermark:
        # They are sent as JSON, and a worker of an earlier version would refuse a field that it does not know.
        job |= {"cache_hints": None}
    for index, request in enumerate(requests):
        ends_at = request.deadline if deadline is None else min(deadline, request.deadline or deadline)
        requests[index] = msgspec.structs.replace(request, id=f"{prefix}-{index}", deadline=ends_at, **job)
    chat = generation.prompts[0].chat if generation.prompts else None
    own_format = None if chat is None or chat.template is None else detect_format(chat.template)
    return BatchLine(custom_id, generation, requests, own_format=own_format)


async def with_images(line: BatchLine, images: ImageIntake, tenant: str) -> BatchLine:
    """Return a line whose images are stored; `ApiError` 400 for a bad one, 429 or 503 if it cannot be stored."""
    generation = line.generation
    if not generation.has_images:
        return line
    generation = await images.stored(msgspec.structs.replace(generation, lane="batch"), tenant, LINE_TTL_S)
    media = [prompt.media for prompt in generation.prompts for _ in range(generation.n)]
    requests = [msgspec.structs.replace(each, media=own) for each, own in zip(line.requests, media, strict=True)]
    return BatchLine(line.custom_id, generation, requests, line.results, line.own_format)


def checked_id(fields: dict[str, Any]) -> str:
    """Return the `custom_id` of a line; raise `BadRequestError` if it has none."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequestError("custom_id has to be a text", "custom_id", "invalid_custom_id")
    if len(custom_id) > MAX_ID_CHARACTERS:
        message = f"custom_id has to have {MAX_ID_CHARACTERS} characters at most"
        raise BadRequestError(message, "custom_id", "invalid_custom_id")
    return custom_id


def _check_is_kept(generation: Generation) -> None:
    sampling, ranking = generation.sampling, generation.ranking
    shows_logprobs = sampling.logprobs is not None if ranking is None else ranking.shows_logprobs
    problems = {
        "stream": generation.stream,
        "logprobs": shows_logprobs or sampling.prompt_logprobs is not None,
        "return_token_ids": generation.details is not None and generation.details.token_ids,
    }
    for name, is_asked in problems.items():
        if is_asked:
            message = f"body: {name!r} is not kept in the results of batch jobs; leave it out"
            raise BadRequestError(message, f"body.{name}", "unsupported_parameter")
