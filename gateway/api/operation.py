"""An API's description of its routes for the public port: bodies, answers and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct


class ErrorDetails(Struct, forbid_unknown_fields=True):
    """What went wrong. `param` names the field at fault, `code` is for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, forbid_unknown_fields=True):
    """An error, whatever the status."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        answer: Of status 200: a struct, or a union of types; None where it is always streamed.
        event: The data of each event, where the answer may be streamed.
        error: Of any other status.
        has_key: Only those who have a key may call it.
        media_type: Of the answer.
    """

    method: str
    path: str
    summary: str
    answer: Any
    body: type[Struct] | None = None
    event: type[Struct] | None = None
    error: type[Struct] = ErrorAnswer
    has_key: bool = True
    media_type: str = "application/json"
