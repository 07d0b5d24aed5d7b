"""The input of llguidance for a `Grammar`: a schema, or a grammar in Lark's syntax.

A grammar that is over a bound, unreadable or unsupported raises `GrammarError`. llguidance does not read
`propertyNames`, so it is written as properties. Libraries write it for records: Zod for every one, Pydantic for those
whose keys are an enumeration.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import msgspec

from shared.grammar.bounds import MAX_PROPERTIES, check_lark, check_regex, check_schema, check_size
from shared.grammar.gbnf import GbnfAsLark
from shared.grammar.grammar import Grammar, GrammarError
from shared.grammar.patterns import with_exact_patterns
from shared.grammar.schema_walk import resolve, schemas_within

_KEYWORD = "propertyNames"
_NOTES = frozenset({"title", "description", "$comment", "examples", "default"})
# What all names may come to, with the schema of their values written for each.
_MAX_WRITTEN_CHARACTERS = 1 << 16


def with_named_properties(schema: Any) -> Any:
    """Return a decoded schema without each `propertyNames` that can be said otherwise; the others stay as they are.

    Its depth is bounded before.
    """
    if not any(_KEYWORD in each for each, _ in schemas_within(schema)):
        return schema
    written = copy.deepcopy(schema)
    num_left = _MAX_WRITTEN_CHARACTERS
    # Inner ones first: what they become counts where it is repeated.
    for each, _ in reversed(list(schemas_within(written))):
        if _KEYWORD in each:
            num_left -= _rewrite(each, written, num_left)
    return written


def _rewrite(schema: dict[str, Any], root: Any, num_left: int) -> int:
    """Write one `propertyNames` otherwise, if it can be; return how many characters were written for its names."""
    names = _constraint(schema[_KEYWORD], root)
    if names is None:
        return 0
    if not names:
        del schema[_KEYWORD]
    elif "patternProperties" in schema:
        return 0
    elif "pattern" in names:
        _write_pattern(schema, names["pattern"])
    else:
        return _write_names(schema, names["enum"], num_left)
    return 0


def _constraint(names: Any, root: Any) -> dict[str, Any] | None:
    """Return the constraint on a name: empty, `enum`, or `pattern`. None for any other."""
    if isinstance(names, dict) and set(names) - _NOTES == {"$ref"} and isinstance(names["$ref"], str):
        names = resolve(root, names["$ref"])
    if names is True:
        return {}
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    asked = {keyword: value for keyword, value in names.items() if keyword not in _NOTES and keyword != "type"}
    if set(asked) == {"const"}:
        asked = {"enum": [asked["const"]]}
    if not asked:
        return asked
    if set(asked) == {"enum"} and isinstance(asked["enum"], list):
        return {"enum": [name for name in asked["enum"] if isinstance(name, str)]}
    if set(asked) <= {"minLength", "maxLength"}:
        return _length_pattern(asked.get("minLength", 0), asked.get("maxLength"))
    return asked if set(asked) == {"pattern"} and isinstance(asked["pattern"], str) else None


def _length_pattern(least: Any, most: Any) -> dict[str, Any] | None:
    """Return names of some lengths, in characters, as a pattern; None if no name has one, or these are not lengths."""
    if type(least) is not int or least < 0:
        return None
    if most is None:
        return {"pattern": f"^[\\s\\S]{{{least},}}$"} if least else {}
    if type(most) is not int or most < least:
        return None
    return {"pattern": f"^[\\s\\S]{{{least},{most}}}$"}


def _write_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "properties" in schema:
        return
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
    del schema[_KEYWORD]


def _write_names(schema: dict[str, Any], names: list[str], num_left: int) -> int:
    properties = schema.get("properties", {})
    value = schema.get("additionalProperties", True)
    if not isinstance(properties, dict) or not set(properties) <= set(names) or len(names) > MAX_PROPERTIES:
        return 0
    num_written = len(names) * len(json.dumps(value)) + sum(map(len, names))
    if num_written > num_left:
        return 0
    schema["properties"] = properties | {name: value for name in names if name not in properties}
    schema["additionalProperties"] = False
    del schema[_KEYWORD]
    return num_written


# One space, or a new line with its indentation: what writers of JSON write. A model cannot go on with spaces for ever.
WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def grammar_text(grammar: Grammar) -> str:
    """Return the text that `LLMatcher` reads.

    Equal grammars have equal texts, on the gateway and on every worker.
    """
    if grammar.kind == "json_schema":
        check_size(grammar.source, "The schema")
        return _encode({"json_schema": llguidance_schema(decode_schema(grammar.source), strict=grammar.strict)})
    if grammar.kind == "regex":
        check_regex(grammar.source)
        return _encode({"lark_grammar": f"start: {lark_regex(grammar.source)}"})
    if grammar.kind == "gbnf":
        check_size(grammar.source, "The grammar")
        lark = GbnfAsLark(grammar.source).text()
    else:
        lark = grammar.source
    check_lark(lark)
    return _encode({"lark_grammar": lark})


def decode_schema(source: str) -> Any:
    """Return a JSON schema within its bounds."""
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"The schema is not valid JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("The schema must be an object or a boolean.")
    check_schema(schema)
    return schema


def llguidance_schema(schema: Any, *, strict: bool) -> Any:
    """Return a decoded schema as llguidance is to be given it, alone or behind `%json` in a Lark grammar."""
    if isinstance(schema, bool):
        return {} if schema else False
    # Every option, so that none that stands in the client's schema weakens it.
    options = {
        "whitespace_pattern": WHITESPACE,
        "whitespace_flexible": True,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": not strict,
    }
    return {**with_exact_patterns(with_named_properties(schema)), "x-guidance": options}


def looks_like_lark(source: str) -> bool:
    """Return whether a grammar is in Lark's syntax: its rules are defined by `:`, those of GBNF by `::=`."""
    return _GBNF_RULE.search(source) is None


def lark_regex(pattern: str) -> str:
    """Return a regular expression as it stands in Lark: between slashes, on one line."""
    escaped: list[str] = []
    is_escape = False
    for character in pattern:
        if character == "/" and not is_escape:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if is_escape else "\\n")
        else:
            escaped.append(character)
        is_escape = character == "\\" and not is_escape
    return f"/{''.join(escaped)}/"


def _encode(grammar: dict[str, Any]) -> str:
    # Not msgspec: it refuses integers of more than 64 bits.
    return json.dumps({"grammars": [grammar]}, separators=(",", ":"))
