"""A response: known before its first token, as JSON at any moment of its life, and as typed events.

Each event has its type twice, as OpenAI's, and the number of its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.operation import Operation
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.responses.body import ItemBody, ResponseBody
from gateway.responses.tools import NamespacedName
from gateway.streams.dialect import COMMENT, Dialect, server_sent_event

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseDraft(Struct, frozen=True, kw_only=True):
    """A response without its output.

    Attributes:
        id: Of the response; its items' ids follow from it.
        created_at: Unix seconds.
        parameters: JSON of an object: the fields of the response that echo the request. Their values are never
            decoded, since numbers in a schema may be of any size.
        input: The items of this request alone, each with an id.
        ancestors: Ids of the earlier responses of this conversation, oldest first.
        is_stored: Whether to keep it for later requests.
        is_background: Whether it is a job of the batch lane.
        has_encrypted_reasoning: Whether reasoning items carry `encrypted_content`, to be sent back.
        has_logprobs: Messages carry log probabilities.
        has_summary: Reasoning stands in the summaries of its items.
        is_compaction: Its only item is a summary of the conversation, for the client to go on with.
        namespaced_names: How the client names functions of namespaces, by the names that the model sees.
    """

    id: str
    created_at: int
    parameters: bytes
    input: list[ItemBody]
    ancestors: tuple[str, ...] = ()
    is_stored: bool = True
    is_background: bool = False
    has_encrypted_reasoning: bool = False
    has_logprobs: bool = False
    has_summary: bool = False
    is_compaction: bool = False
    namespaced_names: dict[str, NamespacedName] = {}


class ResponseGeneration(Generation, frozen=True, kw_only=True):
    """What to generate, and the response that it becomes.

    `may_truncate`: where the conversation is too long for the model, its oldest parts are dropped.
    `is_mostly_instructions`: the instructions are longer than all the rest of the conversation.
    """

    draft: ResponseDraft
    may_truncate: bool = False
    is_mostly_instructions: bool = False

    @property
    def conversation_field(self) -> str:
        """The field that has most of the conversation."""
        return "instructions" if self.is_mostly_instructions else "input"

    @property
    def waits_long(self) -> bool:
        """Whether it is computed in the background, or in a batch."""
        return self.draft.is_background or self.lane == "batch"


class InputDetails(Struct, frozen=True):
    """Input tokens by their cost. `cached_tokens` needed no computation; none are counted as written to a cache."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Output tokens by their use."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, input_tokens: int, output_tokens: int, cached_tokens: int, reasoning_tokens: int) -> ResponseUsage:
        """Return the usage with these counts; those of reasoning are among the output tokens."""
        cached, reasoning = InputDetails(cached_tokens), OutputDetails(reasoning_tokens)
        return cls(input_tokens, cached, output_tokens, reasoning, input_tokens + output_tokens)


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


_decode_parameters = msgspec.json.Decoder(dict[str, Raw]).decode


def response_fields(
    draft: ResponseDraft,
    status: Status,
    output: list[dict[str, Any]] | None = None,
    *,
    usage: ResponseUsage | None = None,
    error: ResponseError | None = None,
    completed_at: int | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a response."""
    reason = "max_output_tokens" if status == "incomplete" else None
    return {
        "id": draft.id,
        "object": "response",
        "created_at": draft.created_at,
        "status": status,
        "completed_at": completed_at,
        "background": draft.is_background,
        "error": error,
        "incomplete_details": None if reason is None else {"reason": reason},
        **_decode_parameters(draft.parameters),
        "output": output or [],
        "store": draft.is_stored,
        "usage": usage,
    }


_END_EVENTS: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    # OpenAI's API has no event of its own for it.
    "cancelled": "response.failed",
}
_encode = msgspec.json.Encoder().encode


class EventWriter:
    """Numbers events and writes them as bytes; `num_events` is the number of the next one."""

    def __init__(self, write: Callable[[bytes], None], starting_after: int = -1, *, has_ids: bool = False) -> None:
        """Pass events to `write`, but for those whose number is not above `starting_after`; `has_ids` as `id:` too."""
        self._write = write
        self._starting_after = starting_after
        self._has_ids = has_ids
        self.num_events = 0

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Write one event."""
        number = self.num_events
        self.num_events += 1
        if number > self._starting_after:
            event = encode_event(kind, fields, number)
            self._write(b"id: %d\n%b" % (number, event) if self._has_ids else event)

    def begin(self, response: dict[str, Any]) -> None:
        """Write the events that begin the stream of a response that is in progress."""
        self.emit("response.created", {"response": response})
        self.emit("response.in_progress", {"response": response})

    def end(self, response: dict[str, Any]) -> None:
        """Write the event that ends the stream, with the whole response.

        A client that has seen it gets nothing more. One whose number is beyond it has seen events of a text that was
        lost with its worker, and this event is new to it.
        """
        if self.num_events < self._starting_after:
            self._starting_after = -1
        self.emit(_END_EVENTS[response["status"]], {"response": response})


def encode_event(kind: str, fields: dict[str, Any], number: int) -> bytes:
    """Return the bytes of one event."""
    return server_sent_event(_encode({"type": kind, **fields, "sequence_number": number}), kind)


def error_event(error: ApiError, number: int = 0) -> bytes:
    """Return an error in both forms: the documented one, and the nested one by which clients know that it is one.

    `number` is the preceding event's: a client that continues after the last number it has seen misses nothing.
    """
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return encode_event("error", fields | {"error": {"type": error.type, **fields}}, number)


RESPONSES = Dialect(ApiError.body, error_event, b"", COMMENT)
"""Errors are OpenAI's; in a stream they are events of their own, and the last event ends it."""


class ResponseAnswer(Struct):
    """A response at some moment of its life. Its items are of the types `message`, `reasoning` and `function_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[dict[str, Any]]
    error: ResponseError | None = None
    incomplete_details: dict[str, Any] | None = None
    usage: ResponseUsage | None = None


class ResponseEvent(Struct):
    """An event of a streamed response; its other fields depend on its type."""

    type: str
    sequence_number: int


class DeletedResponse(Struct, forbid_unknown_fields=True):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputTokenCount(Struct, forbid_unknown_fields=True):
    """The tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedConversation(Struct, forbid_unknown_fields=True):
    """The compacted conversation with which a client continues: the user's messages, then an item `compaction`."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage
    # A summary that was cut off is there all the same.
    incomplete_details: dict[str, Any] | UnsetType = UNSET


class InputItemList(Struct, forbid_unknown_fields=True):
    """What a response was asked, page by page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


OPERATIONS = (
    Operation(
        "post", "/v1/responses", "Answer a conversation and keep it.", ResponseAnswer, ResponseBody, ResponseEvent
    ),
    Operation("post", "/v1/responses/input_tokens", "Count the tokens of a prompt.", InputTokenCount, ResponseBody),
    Operation("post", "/v1/responses/compact", "Summarize a conversation.", CompactedConversation, ResponseBody),
    Operation("get", "/v1/responses/{response_id}", "Show a response.", ResponseAnswer, event=ResponseEvent),
    Operation("delete", "/v1/responses/{response_id}", "Forget a response.", DeletedResponse),
    Operation("post", "/v1/responses/{response_id}/cancel", "Stop a background response.", ResponseAnswer),
    Operation("get", "/v1/responses/{response_id}/input_items", "List what a response was asked.", InputItemList),
)
