"""What the Responses API answers, and its routes. A response, which repeats its request, is written by `draft`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api.operation import Operation
from gateway.responses.body import ResponseBody


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseUsage(Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Struct):
    """A response at some moment of its life. Its items are of the types `message`, `reasoning` and `function_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
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
    """What a client goes on with in the place of a conversation: the user's messages, then an item `compaction`."""

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
