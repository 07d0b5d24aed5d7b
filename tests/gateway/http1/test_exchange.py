"""The head of an answer."""

from __future__ import annotations

import pytest

from gateway.http1.exchange import head_bytes


def test_head_has_a_status_line_and_one_line_for_each_header() -> None:
    assert head_bytes(404, [(b"x-a", b"b"), (b"x-c", b"")]) == b"HTTP/1.1 404 Not Found\r\nx-a: b\r\nx-c: \r\n\r\n"
    assert head_bytes(599, []) == b"HTTP/1.1 599 \r\n\r\n"


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_header_that_would_begin_another_line_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line breaks"):
        head_bytes(200, [(b"x-request-id", value)])
