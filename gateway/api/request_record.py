"""What is known of one request while it is answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.admission.auth import Principal
from gateway.api.usage import UsageTotals
from gateway.errors import ApiError
from gateway.generation import Generation
from shared.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_ERROR_CHARACTERS = 500


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts about one request so far, written by each part that learns one.

    Attributes:
        route: Our own name of it.
        began_at: `time.monotonic()`, as the other times are.
        dispatched_at: When it was admitted and its sequences had been handed to the queue, or to one in flight.
        first_token_at: When its first output came.
        outcome: `refused` until it was dispatched; then how its answer ended.
        error_code, error_message: What its client was told, if that was an error. Not the exception: its traceback
            holds this record, and such circles wait for the garbage collector.
        source: Whether it was `generated`, came from the `cache`, or was `shared` with an identical request in flight.
        span: Its span, when requests are traced; `traceparent` names it to workers.
    """

    route: str
    request_id: str
    began_at: float = field(default_factory=time.monotonic)
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

    def parsed(self, principal: Principal, generation: Generation) -> None:
        """Take note of who asks for what."""
        self.tenant = principal.tenant
        self.generation = generation

    def failed(self, error: ApiError) -> None:
        """Take note of the error that the client got."""
        self.error_code, self.error_message = error.code, error.message

    def timeline(self, gateway: str, status: int, prompt: str | None = None) -> Timeline:
        """Return the timeline of the request without its sequences, which the dispatcher knows.

        Args:
            gateway: Name of this process.
            status: Of its answer; 0 while it runs.
            prompt: The end of its prompt, where it may be shown.
        """
        began_at, usage, generation, now = self.began_at, self.usage, self.generation, time.monotonic()
        return Timeline(
            id=self.request_id,
            gateway=gateway,
            began=time.time() - (now - began_at),
            route=self.route,
            model="" if generation is None else generation.model,
            tenant=self.tenant or "",
            status=status,
            outcome=self.outcome if status else "running",
            error=_error(self),
            source=self.source,
            asked={} if generation is None else _asked(generation),
            prompt=prompt,
            admitted_s=None if self.dispatched_at is None else self.dispatched_at - began_at,
            first_token_s=None if self.first_token_at is None else self.first_token_at - began_at,
            ended_s=now - began_at,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
        )


def _error(record: RequestRecord) -> str | None:
    if record.error_message is None:
        return None
    return f"{record.error_code or 'error'}: {record.error_message}"[:MAX_ERROR_CHARACTERS]


def _asked(generation: Generation) -> dict[str, int | float | str | bool]:
    sampling = generation.sampling
    asked: dict[str, int | float | str | bool | None] = {
        "stream": generation.stream,
        "n": generation.num_choices,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "priority": generation.priority,
    }
    return {name: value for name, value in asked.items() if value is not None}
