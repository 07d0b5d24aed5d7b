"""The tools that a request offers, and which of them the answer has to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON text of the schema of its arguments, which describes an object; None for any object.
        strict: The arguments keep to the schema. Otherwise they are any JSON object.
    """

    name: str
    parameters: str | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer calls tools.

    Attributes:
        mode: `auto` leaves it to the model, `none` forbids calls, `required` demands at least one, `named` demands the
            tool `name`.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
