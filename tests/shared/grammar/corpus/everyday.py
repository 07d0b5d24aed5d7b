"""Schemas as applications write them: records, arguments of tools, answers of classifiers."""

from __future__ import annotations

from typing import Any

from tests.shared.grammar.corpus.case import Case

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}


def _record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _case(properties: dict[str, Any], valid: dict[str, Any], *wrong: dict[str, Any]) -> Case:
    """Return a record with a document. Each of `wrong` replaces members of it; None as a whole value takes one out."""
    bad: list[Any] = [{**valid, **changes} for changes in wrong]
    missing = next(iter(properties))
    bad += [{name: value for name, value in valid.items() if name != missing}, {**valid, "unasked": 1}, [valid], "{}"]
    return Case(_record(properties), [valid], bad)


_ADDRESS = _record({"street": _STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": _STRING})
_MONEY = _record({"amount": {"type": "number", "minimum": 0}, "currency": {"enum": ["EUR", "USD", "JPY"]}})

EVERYDAY = [
    _case(
        {"name": _STRING, "age": {"type": "integer", "minimum": 0}},
        {"name": "Ann", "age": 30},
        {"age": -1},
        {"age": "30"},
    ),
    _case(
        {"name": _STRING, "address": _ADDRESS},
        {"name": "A", "address": {"street": "S 1", "zip": "12345", "city": "C"}},
        {"address": {}},
    ),
    _case(
        {
            "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
        {"sentiment": "neutral", "score": 0.5},
        {"sentiment": "good"},
        {"score": 1.5},
    ),
    _case(
        {"location": _STRING, "unit": {"enum": ["celsius", "fahrenheit"]}},
        {"location": "Paris", "unit": "celsius"},
        {"unit": "kelvin"},
    ),
    _case(
        {"steps": _list(_record({"explanation": _STRING, "output": _STRING})), "final_answer": _STRING},
        {"steps": [{"explanation": "e", "output": "o"}], "final_answer": "x"},
        {"steps": [{"output": "o"}]},
    ),
    _case(
        {"title": _STRING, "tags": _list(_STRING), "published": {"type": "boolean"}},
        {"title": "T", "tags": ["a"], "published": False},
        {"tags": "a"},
        {"published": "no"},
    ),
    _case(
        {"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}},
        {"id": "123e4567-e89b-12d3-a456-426614174000", "at": "2024-01-01T00:00:00Z"},
        {"id": "1"},
        {"at": "now"},
    ),
    _case(
        {"email": {"type": "string", "format": "email"}, "newsletter": {"type": ["boolean", "null"]}},
        {"email": "a@b.org", "newsletter": None},
        {"email": "a"},
        {"newsletter": 1},
    ),
    _case(
        {
            "items": {**_list(_record({"sku": _STRING, "count": {"type": "integer", "minimum": 1}})), "minItems": 1},
            "total": _MONEY,
        },
        {"items": [{"sku": "x", "count": 2}], "total": {"amount": 9.5, "currency": "EUR"}},
        {"items": []},
        {"total": {"amount": -1, "currency": "EUR"}},
    ),
    _case(
        {
            "query": _STRING,
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "sort": {"enum": ["asc", "desc"]},
        },
        {"query": "q", "limit": 10, "sort": "asc"},
        {"limit": 0},
        {"limit": 101},
        {"sort": "up"},
    ),
    _case(
        {
            "latitude": {"type": "number", "minimum": -90, "maximum": 90},
            "longitude": {"type": "number", "minimum": -180, "maximum": 180},
        },
        {"latitude": 48.85, "longitude": -2.25},
        {"latitude": 91},
        {"longitude": -181},
    ),
    _case(
        {
            "question": _STRING,
            "choices": {**_list(_STRING), "minItems": 4, "maxItems": 4},
            "answer": {"enum": ["A", "B", "C", "D"]},
        },
        {"question": "?", "choices": ["1", "2", "3", "4"], "answer": "C"},
        {"choices": ["1"]},
        {"answer": "E"},
    ),
    _case(
        {
            "entities": _list(
                _record({"text": _STRING, "label": {"enum": ["PER", "ORG", "LOC"]}, "start": _INTEGER, "end": _INTEGER})
            )
        },
        {"entities": [{"text": "Ann", "label": "PER", "start": 0, "end": 3}]},
        {"entities": [{"text": "Ann"}]},
    ),
    _case(
        {
            "thought": _STRING,
            "action": {
                "anyOf": [
                    _record({"tool": {"const": "search"}, "query": _STRING}),
                    _record({"tool": {"const": "stop"}}),
                ]
            },
        },
        {"thought": "t", "action": {"tool": "stop"}},
        {"action": {"tool": "search"}},
        {"action": {"tool": "jump"}},
    ),
    _case(
        {
            "color": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
            "alpha": {"type": "number", "minimum": 0, "maximum": 1},
        },
        {"color": "#00ff7f", "alpha": 0.5},
        {"color": "green"},
    ),
    _case(
        {
            "host": {"type": "string", "format": "hostname"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "tls": {"type": "boolean"},
        },
        {"host": "example.org", "port": 443, "tls": True},
        {"port": 0},
        {"port": 65536},
    ),
    _case(
        {
            "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
            "dependencies": {"type": "object", "additionalProperties": _STRING},
        },
        {"version": "1.2.3", "dependencies": {"a": "^1"}},
        {"version": "1"},
        {"dependencies": {"a": 1}},
    ),
    _case({"matrix": _list(_list(_NUMBER))}, {"matrix": [[1, 0], [0, 1.5]]}, {"matrix": [1]}, {"matrix": [["a"]]}),
    _case(
        {
            "isbn": {"type": "string", "pattern": "^97[89][0-9]{10}$"},
            "authors": {**_list(_STRING), "minItems": 1},
            "year": {"type": "integer", "minimum": 1450},
        },
        {"isbn": "9781234567890", "authors": ["A"], "year": 1999},
        {"authors": []},
        {"year": 1200},
    ),
    _case(
        {"label": {"enum": ["spam", "ham"]}, "reasons": {**_list(_STRING), "maxItems": 3}},
        {"label": "spam", "reasons": []},
        {"reasons": ["a", "b", "c", "d"]},
    ),
    _case(
        {
            "start": {"type": "string", "format": "time"},
            "end": {"type": "string", "format": "time"},
            "days": _list({"enum": ["mon", "tue", "wed"]}),
        },
        {"start": "09:00:00Z", "end": "17:00:00Z", "days": ["mon"]},
        {"days": ["sun"]},
    ),
    _case(
        {"sql": _STRING, "parameters": _list({"type": ["string", "number", "boolean", "null"]})},
        {"sql": "select ?", "parameters": ["a", 1.5, True, None]},
        {"parameters": [[]]},
    ),
    _case(
        {
            "summary": {"type": "string", "maxLength": 80},
            "bullets": {**_list({"type": "string", "maxLength": 40}), "minItems": 2, "maxItems": 5},
        },
        {"summary": "s", "bullets": ["a", "b"]},
        {"bullets": ["a"]},
        {"summary": "x" * 81},
    ),
    _case(
        {
            "ratings": _record(
                {
                    "food": {"type": "integer", "minimum": 1, "maximum": 5},
                    "service": {"type": "integer", "minimum": 1, "maximum": 5},
                }
            )
        },
        {"ratings": {"food": 5, "service": 1}},
        {"ratings": {"food": 6, "service": 1}},
    ),
    _case(
        {
            "ip": {"type": "string", "format": "ipv4"},
            "protocol": {"enum": ["tcp", "udp"]},
            "allow": {"type": "boolean"},
        },
        {"ip": "10.0.0.1", "protocol": "udp", "allow": True},
        {"ip": "300.1.1.1"},
        {"protocol": "icmp"},
    ),
    _case(
        {"quantity": {"type": "integer", "multipleOf": 6, "minimum": 6}, "gift": {"type": ["string", "null"]}},
        {"quantity": 12, "gift": None},
        {"quantity": 7},
        {"quantity": 0},
    ),
    _case(
        {"path": {"type": "string", "pattern": r"^/[\w/.-]*$"}, "mode": {"type": "string", "pattern": "^[0-7]{3}$"}},
        {"path": "/etc/hosts", "mode": "644"},
        {"mode": "888"},
        {"path": "etc"},
    ),
    _case(
        {
            "language": {"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
            "text": {"type": "string", "minLength": 1},
        },
        {"language": "de-DE", "text": "Hallo"},
        {"language": "german"},
        {"text": ""},
    ),
    _case(
        {"nodes": _list(_record({"id": _INTEGER})), "edges": _list({**_list(_INTEGER), "minItems": 2, "maxItems": 2})},
        {"nodes": [{"id": 1}], "edges": [[1, 1]]},
        {"edges": [[1]]},
    ),
    _case(
        {"ok": {"const": True}, "data": {"type": "object"}},
        {"ok": True, "data": {"any": [1]}},
        {"ok": False},
        {"data": []},
    ),
    _case(
        {"probabilities": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}}},
        {"probabilities": {"a": 0.5}},
        {"probabilities": {"a": 2}},
    ),
    _case(
        {"phone": {"type": "string", "pattern": r"^\+[0-9]{6,15}$"}, "name": _STRING},
        {"phone": "+491234567", "name": "N"},
        {"phone": "1234"},
    ),
    _case(
        {"cron": {"type": "string", "pattern": r"^(\S+ ){4}\S+$"}, "command": _STRING},
        {"cron": "0 5 * * 1", "command": "run"},
        {"cron": "daily"},
    ),
    _case(
        {
            "a": _INTEGER,
            "b": {"anyOf": [_INTEGER, {"type": "null"}]},
            "c": {"anyOf": [_list(_INTEGER), {"const": "all"}]},
        },
        {"a": 1, "b": None, "c": "all"},
        {"c": "some"},
        {"b": "x"},
    ),
    _case(
        {
            "hex": {"type": "string", "pattern": "^([0-9a-f]{2})+$"},
            "size": {"type": "integer", "minimum": 0, "maximum": 2**32},
        },
        {"hex": "00ff", "size": 2},
        {"hex": "0"},
        {"size": -1},
    ),
    _case(
        {
            "comment": _STRING,
            "issues": _list(
                _record(
                    {
                        "line": {"type": "integer", "minimum": 1},
                        "severity": {"enum": ["low", "high"]},
                        "fix": {"type": ["string", "null"]},
                    }
                )
            ),
        },
        {"comment": "", "issues": [{"line": 3, "severity": "low", "fix": None}]},
        {"issues": [{"line": 0, "severity": "low", "fix": None}]},
    ),
    Case(_record({"a": _STRING, "b": _INTEGER}, optional=("b",)), [{"a": "x"}, {"a": "x", "b": 1}], [{}, {"b": 1}]),
    Case(
        {"title": "Answer", **_record({"yes": {"type": "boolean", "title": "Yes", "description": "Whether."}})},
        [{"yes": True}],
        [{"yes": None}],
    ),
    Case(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **_record({"n": _INTEGER})},
        [{"n": 1}],
        [{"n": "1"}],
    ),
    Case(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": _INTEGER},
            **_record({"n": {"$ref": "#/definitions/n"}}),
        },
        [{"n": 1}],
        [{"n": 1.5}],
    ),
    Case(
        {"type": "array", "items": _record({"word": _STRING, "count": {"type": "integer", "minimum": 1}})},
        [[], [{"word": "a", "count": 1}]],
        [[{"word": "a", "count": 0}], {}],
    ),
    Case(
        _record({"names": {**_list(_STRING), "uniqueItems": True}}),
        [{"names": ["a"]}],
        [{"names": ["a", "a"]}],
        "'uniqueItems'",
    ),
]
