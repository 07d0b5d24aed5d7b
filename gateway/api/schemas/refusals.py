"""The 400s that say what is wrong with a parameter, or where a name stands that another API has in its place.

Chat, Responses and Anthropic's Messages describe tools, choices and schemas each in a form of its own, and whoever
changes from one to another mixes them up.
"""

from __future__ import annotations

import re

from gateway.errors import ApiError

_SCHEMA_WORD = r"(?:type|properties|required|additionalProperties|items|enum|anyOf|\$defs|\$schema|title)"
_FORMS = tuple(
    (re.compile(place), advice)
    for place, advice in (
        (r"tools\.\[\d+\]\.function", "Write what it holds into the tool itself."),
        (r"tools\.\[\d+\]\.parameters", "Name it 'input_schema'."),
        (r"tools\.\[\d+\](?:\.function)?\.input_schema", "Name it 'parameters', within 'function'."),
        (r"tools\.\[\d+\]\.functionDeclarations", "Write each function as a tool of its own."),
        (r"tool_choice\.name", "Write it into 'tool_choice.function'."),
        (r"tool_choice\.function", "Write the name into 'tool_choice' itself."),
        (rf"response_format\.json_schema\.{_SCHEMA_WORD}", "Put the schema into 'response_format.json_schema.schema'."),
        (rf"response_format\.{_SCHEMA_WORD}", "Put the schema into 'schema' of 'json_schema', beside its type."),
        (r"text\.format\.json_schema", "Write what it holds into 'text.format' itself."),
        (r"(?:messages|input)\.\[\d+\]\.(?:parts|value)", "Name it 'content'."),
        (r"(?:messages|input)\.\[\d+\]\.(?:from|author)", "Name it 'role'."),
        (r"messages\.\[\d+\]\.tool_name", "The result names its call in 'tool_call_id'."),
        (r"extra_body", "Write what it holds into the body itself."),
    )
)


def other_form(param: str) -> str:
    """Return a sentence about a name, given with its place, behind a space; empty where no other API has it there."""
    return next((f" {advice}" for place, advice in _FORMS if place.fullmatch(param)), "")


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
