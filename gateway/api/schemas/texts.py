"""What is checked and estimated of a text in a body, the name of a model, and JSON that stays undecoded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, UnsetType

from gateway.api.schemas.refusals import invalid_value
from shared.bounds import MAX_NAME_BYTES


def require_text(param: str, text: str) -> str:
    """Return the text if it may name or delimit something; prompts, of which none is asked, hold any character.

    Raises:
        ApiError: 400; the text holds a NUL character.
    """
    if "\0" in text:
        raise invalid_value(param, f"'{param}' must not contain a NUL character.")
    return text


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text from its length alone: 3.5 bytes each, at least one."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8"))
    return max(1, int(num_bytes / 3.5))


ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]


def checked_model(model: str) -> str:
    """Return the name.

    Raises:
        ApiError: 400; it holds a NUL or is longer than its subject token may be.
    """
    require_text("model", model)
    if len(model.encode("utf-8")) > MAX_NAME_BYTES:
        raise invalid_value("model", f"'model' must be at most {MAX_NAME_BYTES} bytes long in UTF-8.")
    return model


_NULL = b"null"


def given(value: Raw | UnsetType) -> Raw | None:
    """Return the JSON of a field, or None where it was left out or is null."""
    return None if isinstance(value, UnsetType) or bytes(value) == _NULL else value
