"""Errors about a grammar, told about the field in which the client sent it."""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.generation import ToolUse
from shared.structured_output import GRAMMAR_PARAM


def naming_field(error: ApiError, field: str) -> ApiError:
    """Return an error about the grammar as one about `field`; any other error as it is."""
    if error.param != GRAMMAR_PARAM:
        return error
    message = error.message
    if message.startswith(GRAMMAR_PARAM):
        message = f"{field}{message.removeprefix(GRAMMAR_PARAM)}"
    return ApiError(error.status, message, param=field, code=error.code, retry_after_s=error.retry_after_s)


def refused_schema(use: ToolUse, tool_name: str, reason: str, path: str = "") -> ApiError:
    """Return the refusal of a tool's schema, which names the tool and where in the body its schema stands.

    Args:
        use: The tools that the client offers.
        tool_name: Whose schema it is.
        reason: What is wrong.
        path: Where in the schema, as `.properties.name`.
    """
    names = [tool.name for tool in use.tools]
    is_placed = len(names) == len(use.schema_places) and tool_name in names
    where = f"{use.schema_places[names.index(tool_name)]}{path}" if is_placed else "tools"
    return ApiError(400, f"{where}: the schema of '{tool_name}': {reason}", param=where, code="invalid_value")
