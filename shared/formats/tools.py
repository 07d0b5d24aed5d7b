"""The tools that a request offers, which of them the answer has to call, and errors in their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from shared.grammar import GrammarError


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


class ToolSchemaError(GrammarError):
    """The arguments of a tool cannot be held to its schema, in which `path` is a place."""

    def __init__(self, tool_name: str, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.tool_name = tool_name


class TooLargeError(GrammarError):
    """The schemas of all tools together make too large a grammar; no one of them is at fault."""


@contextmanager
def naming_tool(tool: Tool) -> Iterator[None]:
    """Turn a `GrammarError` about the schema of a tool into a `ToolSchemaError`."""
    try:
        yield
    except TooLargeError:
        raise
    except GrammarError as error:
        raise ToolSchemaError(tool.name, error.reason, error.path) from None
