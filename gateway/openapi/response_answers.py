"""What the Responses API answers. Described here; written by `gateway.responses`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


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
    incomplete_details: dict[str, Any] | None = None


class InputItemList(Struct, forbid_unknown_fields=True):
    """What a response was asked, page by page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
