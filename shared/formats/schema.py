"""What a tool's JSON schema says of its arguments, as far as a reader or a grammar needs to know."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from shared.formats.json_reading import escaped, parsed

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_REFERENCES = 16
# Where the whole schema stands beside that of one argument.
_PLACE = "#/$defs/arguments"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ArgumentsSchema:
    """The schema of a tool's arguments, decoded once."""

    def __init__(self, parameters: str | None) -> None:
        """Decode `parameters`; what is no schema of an object says nothing."""
        try:
            schema = parsed(parameters) if parameters else {}
        except ValueError:
            schema = {}
        self._schema: dict[str, Any] = schema if isinstance(schema, dict) else {}

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The schemas of the arguments by name, in their order."""
        properties = self._resolved(self._schema).get("properties")
        return properties if isinstance(properties, dict) else {}

    @cached_property
    def required(self) -> frozenset[str]:
        """The arguments that must be there."""
        required = self._resolved(self._schema).get("required")
        return frozenset(filter(_is_string, required)) if isinstance(required, list) else frozenset()

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; all of them where the schema does not say."""
        return self._types(self.properties.get(name), 0)

    def choices(self, name: str) -> list[Any] | None:
        """Return the values that an argument may have, where the schema lists them."""
        schema = self._resolved(self.properties.get(name))
        if "const" in schema:
            return [schema["const"]]
        return schema["enum"] if isinstance(schema.get("enum"), list) else None

    def conditions(self, name: str) -> dict[str, Any]:
        """Return what else is said of an argument, such as a string's `pattern`."""
        return self._resolved(self.properties.get(name))

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

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        schema = self._resolved(schema)
        if "const" in schema:
            return frozenset({type_name(schema["const"])})
        if isinstance(schema.get("enum"), list):
            return frozenset(map(type_name, schema["enum"]))
        stated = schema.get("type")
        if isinstance(stated, str):
            return frozenset({stated})
        if isinstance(stated, list):
            return frozenset(filter(_is_string, stated))
        for key in ("anyOf", "oneOf"):
            alternatives = schema.get(key)
            if isinstance(alternatives, list) and alternatives and depth < _MAX_REFERENCES:
                return frozenset().union(*(self._types(each, depth + 1) for each in alternatives))
        return ALL_TYPES

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Follow references inside the schema."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self._at(reference)
        return {}

    def _at(self, reference: str) -> Any:
        place: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            place = place.get(key) if isinstance(place, dict) else None
        return place


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
            name = type_name(parsed(bare))
        except ValueError:
            name = "string"
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
