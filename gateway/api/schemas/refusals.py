"""The 400s that say what is wrong with a parameter."""

from __future__ import annotations

from gateway.api.schemas.other_forms import other_form
from gateway.errors import ApiError

# A name of any length may be written; so much of it is repeated.
_MAX_SHOWN_CHARACTERS = 128


def invalid_value(param: str | None, message: str) -> ApiError:
    """Answer for a value that is understood but not allowed."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing_parameter(param: str, expected: str = "") -> ApiError:
    """Answer for a parameter that has to be given; `expected` says what it is."""
    text = f"Missing required parameter: '{param}'{f', {expected}' if expected else ''}."
    return ApiError(400, text, param=param, code="missing_required_parameter")


def unsupported_parameter(param: str, message: str | None = None, *, instead: str = "Leave it out.") -> ApiError:
    """Answer for a parameter that this server does not implement; `instead` says what to do."""
    text = message or f"The parameter '{param}' is not supported by this server. {instead}"
    return ApiError(400, text, param=param, code="unsupported_parameter")


def unknown_parameter(param: str, hint: str = "") -> ApiError:
    """Answer for a name that has no meaning in its place; `hint` begins with a space if there is one."""
    param = param[:_MAX_SHOWN_CHARACTERS]
    return ApiError(
        400, f"Unknown parameter: '{param}'.{other_form(param) or hint}", param=param, code="unknown_parameter"
    )
