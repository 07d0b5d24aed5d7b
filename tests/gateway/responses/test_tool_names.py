"""Names in the functions of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.schemas.known_names import BodyRules
from gateway.errors import ApiError
from gateway.responses.request import parse_body

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": True,
}


def parse(*tools: dict[str, Any], allow_unknown: bool = False) -> None:
    parse_body(json.dumps({"model": "m", "input": "x", "tools": tools}).encode(), BodyRules(allow_unknown))


def test_names_that_functions_have_are_read() -> None:
    more = {
        "defer_loading": True,
        "output_schema": {"a": 1},
        "allowed_callers": ["direct", "programmatic"],
        "async": False,
    }
    parse(FUNCTION, FUNCTION | more, FUNCTION | {"allowed_callers": None, "no_such_name": None})
    parse({"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION | more]})
    parse({"type": "namespace", "name": "n", "tools": None})


@pytest.mark.parametrize(
    ("fields", "name", "code"),
    [
        ({"paramters": {}}, "paramters", "unknown_parameter"),
        ({"function": {"name": "f"}}, "function", "unknown_parameter"),
        ({"allowed_callers": ["programmatic"]}, "allowed_callers", "unsupported_parameter"),
        ({"async": True}, "async", "unsupported_parameter"),
        ({"allowed_callers": 3}, "allowed_callers", "unsupported_parameter"),
    ],
)
def test_name_that_nothing_reads_is_refused_by_its_place(fields: dict[str, Any], name: str, code: str) -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [FUNCTION, FUNCTION | fields]}
    for tools, place in (((FUNCTION, FUNCTION | fields), "tools.[1]"), ((namespace,), "tools.[0].tools.[1]")):
        with pytest.raises(ApiError) as refusal:
            parse(*tools)
        error = refusal.value
        assert (error.status, error.param, error.code) == (400, f"{place}.{name}", code)
        parse(*tools, allow_unknown=True)


def test_other_tools_are_told_by_their_type() -> None:
    # What they have is not looked at here; what becomes of the request says that they are not served.
    parse({"type": "web_search", "search_context_size": "low"})


def test_half_of_a_surrogate_pair_is_no_obstacle() -> None:
    tool = json.dumps(FUNCTION).replace("Adds.", "\\ud83d")
    parse_body(f'{{"model":"m","input":"x","tools":[{tool}]}}'.encode())
