"""What the routes answer that several APIs share: models, the tokenizer, health."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


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
