from __future__ import annotations

import pytest

from shared.http_url import is_http_url


@pytest.mark.parametrize("url", ["http://h", "https://h:8000/v1", "http://[::1]:8000", "http://user:pw@h:1"])
def test_url_with_a_host_is_one_of_http(url: str) -> None:
    assert is_http_url(url)


@pytest.mark.parametrize(
    "url",
    ["h:8000", "127.0.0.1:8000", "ftp://h", "http://", "http://:80", "http://h:port", "http://h:0", "http://[::1"],
)
def test_text_that_no_server_can_be_reached_by_is_refused(url: str) -> None:
    assert not is_http_url(url)
