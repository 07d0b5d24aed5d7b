"""The bytes of events, as clients split them that know the format and as those do that take a stream for a text."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.streams.dialect import server_sent_event

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\\\u2028"


@pytest.mark.parametrize("name", ["", "response.created"])
def test_event_has_no_more_lines_than_its_fields_for_any_client(name: str) -> None:
    event = server_sent_event(msgspec.json.encode({"text": LINE_ENDS}), name)
    *names, data, end = event.decode().splitlines()
    assert (names, end) == ([f"event: {name}"] if name else [], "")
    assert json.loads(data.removeprefix("data: ")) == {"text": LINE_ENDS}
