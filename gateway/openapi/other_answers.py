"""What the other routes answer, and every route's errors."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorDetails(Struct, forbid_unknown_fields=True):
    """What went wrong. `param` names the field at fault, `code` is for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, forbid_unknown_fields=True):
    """An error, whatever the status."""

    error: ErrorDetails


class ModelAnswer(Struct, forbid_unknown_fields=True):
    """A model that live workers serve. `max_model_len` is its context in tokens; then Anthropic's names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


class ModelList(Struct, forbid_unknown_fields=True):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizeAnswer(Struct, forbid_unknown_fields=True):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct, forbid_unknown_fields=True):
    """The text of token ids."""

    prompt: str


class PropsAnswer(Struct):
    """A model, as llama.cpp's server describes itself."""

    default_generation_settings: dict[str, int]
    total_slots: int
    model_alias: str
    chat_template: str
    build_info: str
    modalities: dict[str, bool]


class PromptAnswer(Struct, forbid_unknown_fields=True):
    """The text of a conversation's prompt."""

    prompt: str


class InfillAnswer(Struct):
    """Text between a prefix and a suffix, or a piece of it; what follows `stop` is in the last piece alone."""

    index: int
    content: str
    stop: bool
    model: str
    stop_type: Literal["limit", "word", "eos"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET


class LiveAnswer(Struct, forbid_unknown_fields=True):
    """The process answers."""

    status: Literal["live"]


class ReadyAnswer(Struct, forbid_unknown_fields=True):
    """Whether a request could be served now, and for how many models."""

    status: Literal["ready", "no_queue", "no_worker"]
    models: int


class VersionAnswer(Struct, forbid_unknown_fields=True):
    """The version of the gateway."""

    version: str


class AnthropicErrorReason(Struct, forbid_unknown_fields=True):
    """What is at fault, for the client's program."""

    error_code: str


class AnthropicErrorDetails(Struct, forbid_unknown_fields=True):
    """What went wrong."""

    type: str
    message: str
    details: AnthropicErrorReason | UnsetType = UNSET


class AnthropicError(Struct, forbid_unknown_fields=True):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class AnthropicUsage(Struct, forbid_unknown_fields=True):
    """Token counts. Cached tokens of the prompt are not input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Struct, forbid_unknown_fields=True):
    """A message: blocks of the types `text`, `thinking` and `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(Struct):
    """An event of a streamed message; its other fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(Struct, forbid_unknown_fields=True):
    """The tokens of a prompt."""

    input_tokens: int
