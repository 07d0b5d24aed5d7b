"""What the routes answer that all APIs share: models, the tokenizer, health."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gateway.api.operation import Operation
from gateway.api.schemas.bodies import DetokenizeBody, TokenizeBody
from gateway.fleet.readiness import Status


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
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct, forbid_unknown_fields=True):
    """The text of token ids."""

    prompt: str


class LiveAnswer(Struct, forbid_unknown_fields=True):
    """The process answers."""

    status: Literal["live"]


class ReadyAnswer(Struct, forbid_unknown_fields=True):
    """Whether a request could be served now, and for how many models."""

    status: Status
    models: int


class VersionAnswer(Struct, forbid_unknown_fields=True):
    """The version of the gateway."""

    version: str


OPERATIONS = (
    Operation("get", "/v1/models", "List the models.", ModelList),
    Operation("get", "/v1/models/{model}", "Show one model.", ModelAnswer),
    Operation("post", "/tokenize", "Turn a text or a conversation into token ids.", TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "Turn token ids into text.", DetokenizeAnswer, DetokenizeBody),
    Operation("get", "/health/live", "Say that the process answers.", LiveAnswer, has_key=False),
    Operation("get", "/health/ready", "Say whether requests can be served.", ReadyAnswer, has_key=False),
    Operation("get", "/health", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("post", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/version", "Say which version this is.", VersionAnswer, has_key=False),
)
