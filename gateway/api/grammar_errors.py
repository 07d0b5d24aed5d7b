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


class RefusedSchemaError(ApiError):
    """A 400 about the schema of one tool.

    Attributes:
        tool_name: Whose schema it is.
    """

    def __init__(self, message: str, param: str, tool_name: str) -> None:
        """Refuse with a message about the field `param`."""
        super().__init__(400, message, param=param, code="invalid_value")
        self.tool_name = tool_name


def refused_schema(use: ToolUse, tool_name: str, reason: str, path: str = "") -> RefusedSchemaError:
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
    return RefusedSchemaError(f"{where}: the schema of '{tool_name}': {reason}", where, tool_name)
