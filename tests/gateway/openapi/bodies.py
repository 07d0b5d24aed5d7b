"""Bodies made at random from the schemas of the description, now and then with one thing wrong."""

from __future__ import annotations

import random
from typing import Any

TEXTS = ["", "a", "hello", "é\u4e2d", "\U0001f600", "<|end|>", '{"a": 1}', "\0", "x" * 300]
ANYTHING = [None, True, 0, -1, 2**63, 1e308, 0.5, "a", [], [1], {}, {"type": "object"}, {"type": "text"}]
# Numbers at random are seldom near these, where mistakes are.
NUMBERS = [0, 1, -1, 2, 5, 20, 0.5]


class Bodies:
    """Makes values of schemas of one document. Optional fields are in about one of ten."""

    def __init__(self, components: dict[str, Any], seed: int) -> None:
        self._components = components
        self._random = random.Random(seed)

    def body(self, schema: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = self._value(schema)
        if self._random.random() < 0.3:
            name = self._random.choice([*self._resolved(schema)["properties"], "no_such_name"])
            body[name] = self._random.choice(ANYTHING)
        return body

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        return schema

    def _value(self, schema: dict[str, Any]) -> Any:
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self._value(self._random.choice(schema["anyOf"]))
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            size = self._random.choice([schema.get("minItems", 0), 1, 2])
            return [self._value(schema.get("items", {})) for _ in range(max(size, schema.get("minItems", 0)))]
        if kind in ("integer", "number"):
            return self._number(schema)
        if kind == "string":
            return self._random.choice(TEXTS)
        if kind == "boolean":
            return self._random.random() < 0.5
        return None if kind == "null" else self._random.choice(ANYTHING)

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        required = schema.get("required", [])
        fields = {
            name: self._value(field)
            for name, field in schema.get("properties", {}).items()
            if name in required or self._random.random() < 0.1
        }
        values = schema.get("additionalProperties")
        if isinstance(values, dict) and self._random.random() < 0.5:
            fields[str(self._random.randrange(300))] = self._value(values)
        return fields

    def _number(self, schema: dict[str, Any]) -> int | float:
        low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
        number: int | float = self._random.choice([*NUMBERS, low, high, self._random.uniform(low, high)])
        number = min(max(number, low), high)
        return int(number) if schema["type"] == "integer" else number
