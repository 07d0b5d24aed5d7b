"""Checks of texts and names in a body, and the 400s that name the fault of a parameter.

Chat, Responses and Anthropic's Messages describe tools, choices and schemas each in a form of its own; a 400 names the
right place to clients that mix them up. Query parameters are checked here, too.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Raw, UnsetType
from starlette.requests import Request

from gateway.errors import ApiError
from shared.bounds import MAX_NAME_BYTES

_SCHEMA = "Put the schema into 'response_format.json_schema.schema'."
# Where another API has something that has its place elsewhere here.
_FORMS = tuple(
    (re.compile(place), advice)
    for place, advice in (
        (r"tools\.\[\d+\]\.function", "Write its fields into the tool itself."),
        (r"tools\.\[\d+\]\.parameters", "Name it 'input_schema'."),
        (r"tool_choice\.name", "Write it into 'tool_choice.function'."),
        (
            r"response_format\.(?:json_schema\.)?(?:type|(?:additionalP|p)roperties|required|items|enum|anyOf|\$.*)",
            _SCHEMA,
        ),
        (r"extra_body", "Write its fields into the body itself."),
    )
)


def other_form(param: str) -> str:
    """Return where a name belongs, behind a space; empty if no other API has it in this place."""
    return next((f" {advice}" for place, advice in _FORMS if place.fullmatch(param)), "")


# A name may have any length; an error repeats its beginning.
_MAX_SHOWN_CHARACTERS = 128


def invalid_value(param: str | None, message: str) -> ApiError:
    """Answer for a value that is understood but not allowed."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing_parameter(param: str, expected: str = "") -> ApiError:
    """Answer for a missing parameter; `expected` describes its value."""
    text = f"Missing required parameter: '{param}'{f', {expected}' if expected else ''}."
    return ApiError(400, text, param=param, code="missing_required_parameter")


def unsupported_parameter(param: str, message: str | None = None, *, instead: str = "Leave it out.") -> ApiError:
    """Answer for a parameter that this server does not implement; `instead` is advice."""
    text = message or f"The parameter '{param}' is not supported by this server. {instead}"
    return ApiError(400, text, param=param, code="unsupported_parameter")


def unknown_parameter(param: str, hint: str = "") -> ApiError:
    """Answer for a name that has no meaning in its place; `hint` begins with a space if there is one."""
    param = param[:_MAX_SHOWN_CHARACTERS]
    return ApiError(
        400, f"Unknown parameter: '{param}'.{other_form(param) or hint}", param=param, code="unknown_parameter"
    )


def require_text(param: str, text: str) -> str:
    """Return the text if it may name or delimit something; prompts, of which none is asked, hold any character."""
    if "\0" in text:
        raise invalid_value(param, f"'{param}' must not contain a NUL character.")
    return text


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text from its length alone: 3.5 bytes each, at least one."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8"))
    return max(1, int(num_bytes / 3.5))


ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]


def checked_model(model: str) -> str:
    """Return the name."""
    require_text("model", model)
    if len(model.encode("utf-8")) > MAX_NAME_BYTES:
        raise invalid_value("model", f"'model' must be at most {MAX_NAME_BYTES} bytes long in UTF-8.")
    return model


_NULL = b"null"


def given(value: Raw | UnsetType) -> Raw | None:
    """Return the JSON of a field, or None where it was left out or is null."""
    return None if isinstance(value, UnsetType) or bytes(value) == _NULL else value


def check_query(request: Request, known: frozenset[str], *, allow_unknown: bool) -> None:
    """Refuse unknown query parameters."""
    for name in request.query_params:
        if name not in known and not allow_unknown:
            raise unknown_parameter(name)


def whole_number(text: str | None, name: str, least: int, most: int, default: int) -> int:
    """Return a parameter's value, `default` without one."""
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise invalid_value(name, f"'{name}' must be a whole number from {least} to {most}.")
    return int(text)


def is_ascending(request: Request) -> bool:
    """Whether `order` asks for the oldest objects first."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "'order' must be 'asc' or 'desc'.")
    return order == "asc"
