"""The same thing as another API writes it: where a name that is unknown in its place has another place here.

Chat, Responses and Anthropic's Messages describe tools, choices and schemas each in a form of its own, and whoever
changes from one to another mixes them up.
"""

from __future__ import annotations

import re

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
