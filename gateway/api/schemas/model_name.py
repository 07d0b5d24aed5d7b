"""The name of a model as a body gives it. It becomes a part of a subject of NATS, whose length is bounded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gateway.api.schemas.refusals import invalid_value
from gateway.api.schemas.texts import require_text
from shared.bounds import MAX_NAME_BYTES

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
