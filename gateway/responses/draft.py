"""What is known of a response before its first token, and the response as JSON at any moment of its life."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from gateway.generation import Generation
from gateway.responses.body import ItemBody
from gateway.responses.tools import NamespacedName

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseDraft(Struct, frozen=True, kw_only=True):
    """A response without its output.

    Attributes:
        id: Of the response; its items' ids follow from it.
        created_at: Unix seconds.
        parameters: JSON of an object: the fields of the response that repeat what was asked for. Their values are never
            decoded, since numbers in a schema may be of any size.
        input: The items of this request alone, each with an id.
        ancestors: Ids of the responses whose conversation this one continues, the oldest first.
        is_stored: Keep it for later requests.
        is_background: It is a job of the batch lane.
        has_encrypted_reasoning: Reasoning items carry what the client needs to give them back.
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
    """What to generate, and the response that it becomes."""

    draft: ResponseDraft


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts; `reasoning_tokens` are among the output tokens."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the `usage` object."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class ResponseError(Struct, frozen=True):
    """Why a response failed, in the words of OpenAI's API."""

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
        "error": None if error is None else msgspec.to_builtins(error),
        "incomplete_details": None if reason is None else {"reason": reason},
        **_decode_parameters(draft.parameters),
        "output": output or [],
        "store": draft.is_stored,
        "usage": None if usage is None else usage.fields(),
    }
