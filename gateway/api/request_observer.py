"""Reports each request of a generating route when it ends: a log line, and spans for OpenTelemetry.

Neither has any text of prompts or answers, unless the operator asks for prompts in the log. Without traces, all that
they cost is a comparison with None. What a timeline keeps of a request's parameters is for asking it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec import structs

from gateway.api.usage import UsageTotals
from gateway.dispatch.inflight import new_key
from gateway.dispatch.timelines import TimelineKeeper
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from shared.conversation import ChatOptions
from shared.request_log import RequestLog, is_slow
from shared.sampling import Sampling
from shared.timeline import SequenceLife, Timeline
from shared.tracing import AttributeValue, Tracing, traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_PROMPT_CHARACTERS = 500
MAX_ERROR_CHARACTERS = 500
_TRACEPARENT = b"traceparent"
# Names of OpenTelemetry's conventions for generative AI, for our kinds of answers.
_OPERATIONS = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "score": "score"}
_PLAIN, _PLAIN_CHAT = Sampling(), ChatOptions()
# Parameters of sampling with one value, whose names are those of the API, besides those that are always shown.
_TOLD = ("temperature", "top_p", "seed")
_SINGLE = tuple(
    name for name, value in structs.asdict(_PLAIN).items() if isinstance(value, int | float) and name not in _TOLD
)
_LISTS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids")
_singles, _lists = attrgetter(*_SINGLE), attrgetter(*_LISTS)
_PLAIN_SINGLES = _singles(_PLAIN)
# Fields that a record drops when its request has ended.
_SMALL: dict[str, Any] = {
    "prompts": (),
    "prediction": None,
    "structured_output": None,
    "looser_grammar": None,
    "tools": None,
    "cache_hints": None,
    "kv_budget": None,
    "reading": None,
}
_FIELDS = Generation.__struct_fields__
_WITHOUT: dict[str, Any] = {name: getattr(_PLAIN, name) for name in (*_LISTS, "grammar", "stop")}
# Options of a chat template, by the parameters that they come from.
_CHAT = {"tools": "tools", "variables": "chat_template_kwargs", "template": "chat_template"}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts about one request so far, written by each part that learns one.

    Attributes:
        route: Our own name of it.
        began_at: `time.monotonic()`, as the other times are.
        began: The same moment in Unix seconds.
        dispatched_at: When it was admitted and its sequences had been handed to the queue, or to one in flight.
        first_token_at: When its first output came.
        outcome: `refused` until it was dispatched; then how its answer ended.
        error_code, error_message: Of the error sent to its client, if any. Not the exception: its traceback holds this
            record, and such reference cycles wait for the garbage collector.
        source: Whether it was `generated` or came from the `cache`.
        key: Distinguishes it from others with its `x-request-id`.
        span: Its span, when requests are traced; `traceparent` names it to workers.
        status: Of its answer; 0 while it runs.
        ended_at: None while it runs.
        not_kept, stop, prompt: As in `Timeline`, once it has ended.
        sequences, left_out: Written by the keeper of timelines.
    """

    route: str
    request_id: str
    began_at: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)
    tenant: str | None = None
    generation: Generation | None = None
    dispatched_at: float | None = None
    first_token_at: float | None = None
    outcome: str = "refused"
    error_code: str | None = None
    error_message: str | None = None
    usage: UsageTotals | None = None
    source: str = "generated"
    span: Span | None = None
    traceparent: str | None = None
    key: str = field(default_factory=new_key)
    status: int = 0
    ended_at: float | None = None
    not_kept: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    prompt: str | None = None
    sequences: list[SequenceLife] = field(default_factory=list)
    left_out: int = 0

    def failed(self, error: ApiError) -> None:
        """Take note of the error that the client got."""
        self.error_code, self.error_message = error.code, error.message

    def since_beginning(self, moment: float | None) -> float | None:
        """Return the seconds until a moment, if that has come."""
        return None if moment is None else moment - self.began_at

    def end(self, status: int, *, keeps_texts: bool) -> None:
        """Keep the fields of a timeline, without large ones: prompts, grammars, lists.

        Args:
            status: Of its answer.
            keeps_texts: With the end of its prompt, and its stop strings.
        """
        self.status, self.ended_at = status, time.monotonic()
        self.span = None
        if (generation := self.generation) is None:
            return
        has_texts = keeps_texts and len(generation.prompts) > 0
        self.not_kept = _not_kept(generation, keeps_texts=has_texts)
        if has_texts:
            self.stop, self.prompt = generation.sampling.stop, _excerpt(generation.prompts[0])
        sampling = generation.sampling
        if self.not_kept or sampling.grammar is not None or sampling.stop:
            sampling = structs.replace(sampling, **_WITHOUT)
        if type(generation) is not Generation:
            # Of an endpoint that has more of its own, such as all items of a conversation.
            generation = Generation(**{name: getattr(generation, name) for name in _FIELDS})
        self.generation = structs.replace(generation, sampling=sampling, **_SMALL)

    def timeline(self, gateway: str) -> Timeline:
        """Return the timeline of the request without its sequences, which the dispatcher knows.

        Args:
            gateway: Name of this process.
        """
        usage, generation, ended_at = self.usage or UsageTotals(1), self.generation, self.ended_at or time.monotonic()
        error = None
        if self.error_message is not None:
            error = f"{self.error_code or 'error'}: {self.error_message}"[:MAX_ERROR_CHARACTERS]
        return Timeline(
            id=self.request_id,
            gateway=gateway,
            began=self.began,
            route=self.route,
            model="" if generation is None else generation.model,
            tenant=self.tenant or "",
            status=self.status,
            outcome=self.outcome if self.status else "running",
            error=error,
            source=self.source,
            asked={} if generation is None else _asked_parameters(generation),
            stop=self.stop,
            not_kept=self.not_kept,
            prompt=self.prompt,
            admitted_s=self.since_beginning(self.dispatched_at),
            first_token_s=self.since_beginning(self.first_token_at),
            ended_s=ended_at - self.began_at,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )


class RequestObserver:
    """Reports requests to the log, traces and timelines."""

    def __init__(
        self,
        log: RequestLog,
        tracing: Tracing | None = None,
        *,
        logs_prompts: bool = False,
        timelines: TimelineKeeper | None = None,
    ) -> None:
        self._timelines = timelines
        self._log = log
        self._tracing = tracing
        self._logs_prompts = logs_prompts

    def begin(self, route: str, request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestRecord:
        """Begin the record of a request, and its timeline."""
        record = RequestRecord(route, request_id)
        if self._tracing is not None:
            parents = [value.decode("latin-1") for name, value in headers if name == _TRACEPARENT]
            record.span = self._tracing.begin(route, parents[0] if len(parents) == 1 else None)
            record.traceparent = traceparent(record.span)
        if self._timelines is not None:
            self._timelines.request_began(record.key, record)
        return record

    def end(self, record: RequestRecord, status: int) -> None:
        """Tell of a request that has ended with an HTTP status; 499 where its client left."""
        ttft_s, total_s = record.since_beginning(record.first_token_at), time.monotonic() - record.began_at
        is_problem = status >= 400 or record.error_code is not None or is_slow(ttft_s, total_s)
        fields = partial(self._fields, record, status, ttft_s, total_s)
        self._log.write("request", fields, "problem" if is_problem else "request")
        if self._tracing is not None and record.span is not None:
            self._end_span(self._tracing, record, record.span, status)
        if self._timelines is not None:
            record.end(status, keeps_texts=self._timelines.shows_prompts)
            self._timelines.request_ended(record.key, record)

    def _fields(self, record: RequestRecord, status: int, ttft_s: float | None, total_s: float) -> dict[str, object]:
        generation, usage = record.generation, record.usage
        fields: dict[str, object] = {
            "request_id": record.request_id,
            "route": record.route,
            "status": status,
            "outcome": record.outcome,
            "error": record.error_code,
            "tenant": record.tenant,
        }
        if generation is not None:
            fields |= {"model": generation.model, "n": generation.num_sequences, "stream": generation.stream}
            if num_images := sum([len(prompt.images) for prompt in generation.prompts]):
                fields["images"] = num_images
            if self._logs_prompts:
                fields["prompt"] = _excerpt(generation.prompts[0])
        if usage is not None:
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["cached_tokens"] = usage.cached_tokens
            fields["completion_tokens"] = usage.completion_tokens
        fields["admission_s"] = record.since_beginning(record.dispatched_at)
        fields |= {"ttft_s": ttft_s, "total_s": total_s}
        return fields

    def _end_span(self, tracing: Tracing, record: RequestRecord, span: Span, status: int) -> None:
        generation, usage = record.generation, record.usage
        attributes: dict[str, AttributeValue | None] = {
            "http.response.status_code": status,
            "http.route": record.route,
            "gen_ai.provider.name": "headrace",
            "headrace.request_id": record.request_id,
            "headrace.tenant": record.tenant,
            "headrace.outcome": record.outcome,
            "headrace.time_to_first_token_s": record.since_beginning(record.first_token_at),
            "error.type": None if record.error_message is None else record.error_code or str(status),
        }
        name = record.route
        if generation is not None:
            name = f"{_OPERATIONS[generation.kind]} {generation.model}"
            sampling, num_choices = generation.sampling, generation.num_choices
            attributes |= {
                "gen_ai.operation.name": _OPERATIONS[generation.kind],
                "gen_ai.request.model": generation.model,
                "gen_ai.response.model": generation.model,
                "gen_ai.request.choice.count": num_choices if num_choices > 1 else None,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
            }
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if record.dispatched_at is not None and record.traceparent is not None:
            tracing.add("admission", record.traceparent, record.began_at, record.dispatched_at, {})
        error = record.error_message if status >= 500 else None
        tracing.end(span, name, attributes, error)


def _asked_parameters(generation: Generation) -> dict[str, int | float | str | bool]:
    """Return the parameters that have one value and are not text, without those that the client left to the model."""
    sampling = generation.sampling
    asked: dict[str, int | float | str | bool | None] = {
        "stream": generation.stream,
        "n": generation.num_choices,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "priority": generation.priority,
        "timeout": generation.timeout_s,
        "truncate_prompt_tokens": generation.truncate_prompt_tokens,
    }
    if generation.deterministic and sampling.temperature > 0:
        # Without one of the client's choice, the next answer is another one, too.
        asked["seed"] = sampling.seed
    if generation.echo:
        asked["echo"] = True
    ranking = generation.ranking
    if ranking is not None:
        asked["best_of"] = generation.n
    if (singles := _singles(sampling)) != _PLAIN_SINGLES:
        told = zip(_SINGLE, singles, _PLAIN_SINGLES, strict=True)
        asked |= {name: value for name, value, plain in told if value != plain}
    # Those by which the best ones are chosen are not told.
    if sampling.logprobs is not None and (ranking is None or ranking.shows_logprobs):
        is_chat = generation.kind == "chat"
        asked |= {"logprobs": True, "top_logprobs": sampling.logprobs} if is_chat else {"logprobs": sampling.logprobs}
    if generation.details is not None and generation.details.prompt_logprobs:
        asked["prompt_logprobs"] = sampling.prompt_logprobs
    return {name: value for name, value in asked.items() if value is not None and name not in generation.left_out}


def _not_kept(generation: Generation, *, keeps_texts: bool) -> tuple[str, ...]:
    """Name the parameters that were given and are not kept: most are long, or texts."""
    sampling, prompts = generation.sampling, generation.prompts
    lists = _lists(sampling)
    found = [name for name, value in zip(_LISTS, lists, strict=True) if value] if any(lists) else []
    if sampling.stop and not keeps_texts:
        found.append("stop")
    if generation.structured_output is not None:
        found.append(generation.structured_output.field)
    if not generation.may_reason:
        found.append("reasoning_effort")
    if prompts:
        found += _not_kept_of_prompt(prompts[0], is_only=len(prompts) == 1)
    return tuple(sorted(set(found))) if found else ()


def _excerpt(prompt: Prompt) -> str | None:
    """Return the end of a prompt, where a conversation's newest text stands; None for token ids."""
    text = _newest(prompt)
    return None if text is None else text[-MAX_PROMPT_CHARACTERS:]


def _newest(prompt: Prompt) -> str | None:
    return str(prompt.messages[-1].content) if prompt.messages else prompt.text


def _not_kept_of_prompt(prompt: Prompt, *, is_only: bool) -> list[str]:
    text, messages = _newest(prompt), prompt.messages
    is_whole = is_only and text is not None and len(text) <= MAX_PROMPT_CHARACTERS and not prompt.images
    if messages:
        is_whole = is_whole and len(messages) == 1 and messages[0].role == "user"
    found = [] if is_whole else ["messages" if messages else "prompt"]
    if prompt.suffix:
        found.append("suffix")
    if prompt.chat is not None and prompt.chat != _PLAIN_CHAT:
        given = structs.asdict(prompt.chat).items()
        found += [_CHAT.get(name, name) for name, value in given if value != getattr(_PLAIN_CHAT, name)]
    return found
