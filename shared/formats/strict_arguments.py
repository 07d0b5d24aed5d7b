"""Strict arguments of families that do not write them as JSON: what of a schema their grammar can hold to.

What it cannot is refused by a `GrammarError`, so that a strict tool is never less than strict.
"""

from __future__ import annotations

import json
from typing import Any

from shared.formats.lark_text import ANY_TEXT, LarkText, quoted, whole_pattern
from shared.formats.schema import ArgumentsSchema
from shared.formats.tools import Tool
from shared.grammar import GrammarError
from shared.grammar.grammar_text import lark_regex
from shared.grammar.patterns import is_note

_REFUSED_AT_THE_TOP = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
)
_REFUSED_OF_STRINGS = frozenset({"allOf", "anyOf", "oneOf", "not", "if"})

_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_FORMATS = {
    "date": _DAY,
    "time": _HOUR,
    "date-time": f"{_DAY}[tT]{_HOUR}",
    "duration": r"P([0-9]+W|[0-9]+[YMD]([0-9]+[MD])?(T[0-9]+[HMS])?|T[0-9]+[HMS])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::|::1",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&()*+,;=%-]+",
}


def strict_schema(tool: Tool) -> ArgumentsSchema:
    """Return the schema of a strict tool's arguments."""
    schema = ArgumentsSchema(tool.parameters)
    refused = sorted(_REFUSED_AT_THE_TOP & schema.root.keys())
    if refused:
        reason = f"'{refused[0]}' is not supported at the top of a strict tool's parameters"
        raise GrammarError(f"{reason} with this model, which does not write arguments as one JSON object.")
    missing = sorted(schema.required - schema.properties.keys())
    if missing:
        raise GrammarError(f"it requires '{missing[0]}', which is not among its properties.")
    return schema


def json_value(lark: LarkText, schema: ArgumentsSchema, name: str, types: frozenset[str]) -> str:
    """Return a rule for an argument as JSON, where it has one of `types`."""
    # Equal schemas are written once: each may refer to the whole.
    key = (json.dumps(schema.properties[name]), types)
    if key not in schema.written:
        schema.written[key] = lark.schema(schema.standalone(name, types))
    return schema.written[key]


def raw_string(lark: LarkText, schema: ArgumentsSchema, own: Any, end: str) -> str:
    """Return an expression for a string without quotes that keeps to its `own` schema, and the marker behind it."""
    strings = [each for each in schema.alternatives(own) if "string" in schema.types_of(each)]
    written = [_alternative(lark, each, end) for each in strings]
    return written[0] if len(written) == 1 else f"( {' | '.join(written)} )"


def _alternative(lark: LarkText, conditions: dict[str, Any], end: str) -> str:
    choices = [conditions["const"]] if "const" in conditions else conditions.get("enum")
    if isinstance(choices, list):
        texts = " | ".join(quoted(each) for each in choices if isinstance(each, str))
        return f"( {texts} ) {lark.literal(end)}"
    for keyword in sorted(_REFUSED_OF_STRINGS & conditions.keys()):
        reason = f"'{keyword}' beside other conditions of a string is not supported with this model"
        raise GrammarError(f"{reason}, which writes strings without quotes.")
    return lark.through(end, (end.strip(),), " & ".join(_patterns(conditions)))


def _patterns(conditions: dict[str, Any]) -> list[str]:
    patterns = []
    least, most = conditions.get("minLength", 0), conditions.get("maxLength", "")
    if least or most != "":
        if not all(isinstance(each, int) and each >= 0 for each in (least, most or 0)):
            raise GrammarError("'minLength' and 'maxLength' must be whole numbers.")
        patterns.append(f"/(?s:.{{{least},{most}}})/")
    if isinstance(conditions.get("pattern"), str):
        patterns.append(whole_pattern(conditions["pattern"]))
    name = conditions.get("format")
    if isinstance(name, str) and not is_note(name):
        if name not in _FORMATS:
            raise GrammarError(f"the format '{name[:64]}' is not supported.")
        patterns.append(lark_regex(_FORMATS[name]))
    return patterns or [ANY_TEXT]
