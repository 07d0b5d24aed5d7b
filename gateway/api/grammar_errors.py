"""A worker's error about a grammar, told about the field in which the client sent it."""

from __future__ import annotations

from gateway.errors import ApiError
from shared.structured_output import GRAMMAR_PARAM


def naming_field(error: ApiError, field: str) -> ApiError:
    """Return an error about the grammar as one about `field`; any other error as it is."""
    if error.param != GRAMMAR_PARAM:
        return error
    message = error.message
    if message.startswith(GRAMMAR_PARAM):
        message = f"{field}{message.removeprefix(GRAMMAR_PARAM)}"
    return ApiError(error.status, message, param=field, code=error.code, retry_after_s=error.retry_after_s)
