"""Says of an error in a tool's schema whose schema it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.formats.tools import Tool
from shared.grammar import GrammarError


class ToolSchemaError(GrammarError):
    """The arguments of a tool cannot be held to its schema.

    Attributes:
        tool_name: Whose schema it is; `path` is a place in it.
    """

    def __init__(self, tool_name: str, reason: str, path: str = "") -> None:
        """Name the tool, and say what is wrong and where."""
        super().__init__(reason, path)
        self.tool_name = tool_name


class TooLargeError(GrammarError):
    """The schemas of all tools together make too large a grammar; no one of them is at fault."""


@contextmanager
def naming_tool(tool: Tool) -> Iterator[None]:
    """Let errors in the schema of a tool say that they are.

    Raises:
        ToolSchemaError: The body has raised a `GrammarError` about the schema.
    """
    try:
        yield
    except TooLargeError:
        raise
    except GrammarError as error:
        raise ToolSchemaError(tool.name, error.reason, error.path) from None
