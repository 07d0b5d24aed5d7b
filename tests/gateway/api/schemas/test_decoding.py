"""What a body that is no JSON is told."""

from __future__ import annotations

import pytest

from gateway.api.schemas import parse_chat
from gateway.errors import ApiError


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "The body is empty"),
        (b" \n", "The body is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{'model': 'm'}", "Write double quotes"),
        (b"'{model: m}'", "Write double quotes"),
        (b'{"stream": True}', "in the value of 'stream'"),
        (b'{"stream": True}', "Write true, false or null"),
        (b'{"stop": None}', "Write true, false or null"),
        (b"model=m&prompt=x", "Send a JSON object, no form"),
        (b'--boundary\r\nContent-Disposition: form-data; name="model"', "Send a JSON object, no form"),
        (b'{"model": "m",}', "trailing comma in object (byte 14)."),
    ],
)
def test_body_that_is_no_json_is_told_what_to_write(body: bytes, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert told in caught.value.message
