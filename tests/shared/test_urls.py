from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.urls import check_url, is_http_url, login_in


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4222",
        "nats://[::1]:4222",
        "[::1]:4222",
        "queue",
        "tls://user:p%2Fass@nats-0.nats:4222, tls://nats-1.nats/",
        "nats://token@host",
    ],
)
def test_url_of_nats_is_taken(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nats://::1:4222", r"is not a host and port; .* brackets \(nats://\[::1\]:4222\)"),
        ("::1", "is not a host and port"),
        ("nats://[::1", "is not a host and port"),
        ("nats://host:port", "is not a host and port"),
        ("nats://host:99999", "is not a host and port"),
        ("nats://", "is not a host and port"),
        ("nats://a:4222,", "server 2 of it is not a host and port"),
        ("nats://user:secret#1@host", "as %2F %3F %23"),
        ("nats://user:secret/1@host", "as %2F %3F %23"),
        ("nats://user:1234/secret@host", "as %2F %3F %23"),
        ("nats://user:secret,1@host", "server 1 of it is not a host and port"),
        ("ws://host", "begins with ws://; allowed: nats, tls"),
    ],
)
def test_url_that_is_none_is_refused_without_its_password(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^HEADRACE_NATS_URL: .*{told}") as error:
        check_url(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("nats://host:4222", None),
        ("nats://token@host", None),
        ("nats://user:p%40ss%2F@host", ("user", "p@ss/")),
        ("user:pass@host:4222", ("user", "pass")),
        ("nats://u:p@a:1,nats://u:p@b:1,nats://c:1", ("u", "p")),
        ("nats://u:p@a:1,nats://v:q@b:1", None),
    ],
)
def test_login_of_a_url(url: str, login: tuple[str, str] | None) -> None:
    assert login_in(url) == login


@pytest.mark.parametrize("url", ["http://h", "https://h:8000/v1", "http://[::1]:8000", "http://user:pw@h:1"])
def test_url_with_a_host_is_one_of_http(url: str) -> None:
    assert is_http_url(url)


@pytest.mark.parametrize(
    "url",
    ["h:8000", "127.0.0.1:8000", "ftp://h", "http://", "http://:80", "http://h:port", "http://h:0", "http://[::1"],
)
def test_text_that_no_server_can_be_reached_by_is_refused(url: str) -> None:
    assert not is_http_url(url)
