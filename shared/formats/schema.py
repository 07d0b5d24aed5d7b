"""What a tool's JSON schema says of its arguments, as far as a reader or a grammar needs to know."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from shared.formats.json_reading import escaped, parsed

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_REFERENCES = 16
# Where the whole schema stands beside that of one argument.
_PLACE = "#/$defs/arguments"
_NOTHING: dict[str, Any] = {}
# What says more of a value than which alternatives there are.
_CONDITIONS = frozenset(
    {"const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "pattern", "format", "minLength", "maxLength"}
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ArgumentsSchema:
    """The schema of a tool's arguments, decoded once; `written` are rules of its grammar, by argument and types."""

    def __init__(self, parameters: str | None) -> None:
        try:
            schema = parsed(parameters) if parameters else {}
        except ValueError:
            schema = {}
        self._schema: dict[str, Any] = schema if isinstance(schema, dict) else {}
        self._types: dict[int, frozenset[str]] = {}
        self.written: dict[tuple[str, frozenset[str]], str] = {}

    @property
    def root(self) -> dict[str, Any]:
        """The schema of the whole object."""
        return self.resolved(self._schema)

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments by name, in their order."""
        properties = self.root.get("properties")
        return properties if isinstance(properties, dict) else {}

    @cached_property
    def required(self) -> frozenset[str]:
        """The arguments that must be there."""
        required = self.root.get("required")
        return frozenset(filter(_is_string, required)) if isinstance(required, list) else frozenset()

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; all of them where the schema does not say."""
        return self.types_of(self.properties.get(name))

    def choices(self, name: str) -> list[Any] | None:
        """Return the values that an argument may have, where the schema lists them."""
        schema = self.resolved(self.properties.get(name))
        if "const" in schema:
            return [schema["const"]]
        return schema["enum"] if isinstance(schema.get("enum"), list) else None

    def standalone(self, name: str, types: frozenset[str]) -> dict[str, Any]:
        """Return the schema of one argument where it has one of `types`, so that it can stand alone."""
        own = self.properties[name]
        of_types = {"type": sorted(types)}
        if not _has_reference(own):
            return {"allOf": [own, of_types]}
        return {"allOf": [moved(own, _PLACE), of_types], "$defs": {"arguments": self._moved}}

    @cached_property
    def _moved(self) -> Any:
        return moved(self._schema, _PLACE)

    def types_of(self, schema: Any) -> frozenset[str]:
        """Return the JSON types that a part of the schema allows."""
        types = frozenset[str]()
        for each in self.alternatives(schema):
            if id(each) not in self._types:
                self._types[id(each)] = _stated_types(each)
            types |= self._types[id(each)]
        return types

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Return a part of the schema, or what it offers instead by `anyOf`, `oneOf` or a single `allOf`."""
        alternatives: list[dict[str, Any]] = []
        waiting, seen = [schema], set[int]()
        while waiting:
            each = self.resolved(waiting.pop())
            if id(each) in seen:
                continue
            seen.add(id(each))
            keyword = next((key for key in ("anyOf", "oneOf", "allOf") if isinstance(each.get(key), list)), "")
            is_choice = keyword and not _CONDITIONS & (each.keys() - {keyword})
            if is_choice and each[keyword] and (keyword != "allOf" or len(each[keyword]) == 1):
                waiting += reversed(each[keyword])
            else:
                alternatives.append(each)
        return alternatives

    def resolved(self, schema: Any) -> dict[str, Any]:
        """Follow references inside the schema."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                return _NOTHING
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self._at(reference)
        return _NOTHING

    def _at(self, reference: str) -> Any:
        place: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, dict) else None
        return place


def _stated_types(schema: dict[str, Any]) -> frozenset[str]:
    if "const" in schema:
        return frozenset({type_name(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_name, schema["enum"]))
    stated = schema.get("type")
    if isinstance(stated, list):
        return frozenset(filter(_is_string, stated))
    return frozenset({stated}) if isinstance(stated, str) else ALL_TYPES


def type_name(value: Any) -> str:
    """Return the JSON type of a decoded value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument that a model wrote without quotes.

    It is what the schema allows: a number for a number, but the text `12` for a string.
    """
    bare = text.strip()
    if types != {"string"}:
        bare = _PYTHON_WORDS.get(bare, bare)
        try:
            value = parsed(bare)
        except ValueError:
            value = ""
        name = type_name(value)
        is_whole = isinstance(value, float) and value.is_integer()
        if is_whole and "integer" in types and not types & {"number", "string"}:
            return str(int(value))
        if name != "string" and (name in types or (name == "integer" and "number" in types)):
            return bare
    return f'"{escaped(text)}"'


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _has_reference(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_reference, schema))
    return isinstance(schema, dict) and ("$ref" in schema or any(map(_has_reference, schema.values())))


def moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself hold where it stands at `place` in another schema."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {key: moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        whole["$ref"] = f"{place}{reference[1:]}"
    return whole
