"""What browsers are told of answers to pages of other origins."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.door import CrossOrigin
from gateway.http1.head import parse_head
from shared.errors import ConfigError

CHAT, OTHER = b"https://chat.example.com", b"https://other.example.com"
ORIGINS = " https://chat.example.com, http://localhost:3000,,"


class Asked:
    """An exchange of which only the head is known; `answer` is what it is answered with."""

    def __init__(self, method: str, **headers: bytes) -> None:
        lines = b"".join(b"%b: %b\r\n" % (name.replace("_", "-").encode(), text) for name, text in headers.items())
        self.head = parse_head(b"%b /v1/models HTTP/1.1\r\nHost: t\r\n%b\r\n" % (method.encode(), lines))
        self.answer: tuple[int, dict[bytes, bytes], bytes] | None = None

    def respond(self, status: int, headers: Any, body: bytes) -> None:
        self.answer = (status, dict(headers), body)


def headers(asked: Asked, origins: str = ORIGINS) -> dict[bytes, bytes]:
    return dict(CrossOrigin(origins).answer_headers(asked))  # type: ignore[arg-type]


def is_preflight(asked: Asked, origins: str = ORIGINS) -> bool:
    return CrossOrigin(origins).answer_preflight(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", [CHAT, b"http://localhost:3000"])
def test_page_of_a_named_origin_may_read_answers_and_their_headers(origin: bytes) -> None:
    found = headers(Asked("GET", origin=origin))
    exposed = found.pop(b"access-control-expose-headers").split(b", ")
    assert found == {b"vary": b"origin", b"access-control-allow-origin": origin}
    assert {b"x-request-id", b"retry-after", b"x-ratelimit-remaining-tokens"} <= set(exposed)


@pytest.mark.parametrize("given", [{"origin": OTHER}, {"origin": b"null"}, {}, {"origin": CHAT + b"/"}])
def test_other_pages_may_not_and_caches_are_told(given: dict[str, bytes]) -> None:
    assert headers(Asked("GET", **given)) == {b"vary": b"origin"}


@pytest.mark.parametrize("origins", ["", " , "])
def test_without_origins_nothing_is_said(origins: str) -> None:
    assert headers(Asked("GET", origin=CHAT), origins) == {}
    assert not is_preflight(Asked("OPTIONS", origin=CHAT, access_control_request_method=b"POST"), origins)


def test_question_before_a_request_is_answered() -> None:
    asked = Asked(
        "OPTIONS",
        origin=CHAT,
        access_control_request_method=b"POST",
        access_control_request_headers=b"authorization, content-type",
    )
    assert is_preflight(asked)
    assert asked.answer == (
        204,
        {
            b"access-control-allow-methods": b"GET, HEAD, POST, DELETE",
            b"access-control-allow-headers": b"authorization, content-type",
            b"access-control-max-age": b"600",
        },
        b"",
    )


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("GET", {"origin": CHAT, "access_control_request_method": b"POST"}),
        ("OPTIONS", {"origin": CHAT}),
        ("OPTIONS", {"origin": OTHER, "access_control_request_method": b"POST"}),
        ("OPTIONS", {"access_control_request_method": b"POST"}),
    ],
)
def test_what_is_no_such_question_is_left_to_the_routes(method: str, given: dict[str, bytes]) -> None:
    asked = Asked(method, **given)
    assert not is_preflight(asked)
    assert asked.answer is None


@pytest.mark.parametrize("origin", ["chat.example.com", "*", "https://a.com/", "ftp://a.com", "https://A.com", "null"])
def test_what_is_no_origin_is_refused_by_its_variable(origin: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_CORS_ORIGINS") as refused:
        CrossOrigin(f"https://chat.example.com,{origin}")
    assert repr(origin) in str(refused.value)


@pytest.mark.parametrize(
    "origin", [b"http://localhost", b"http://localhost:5173", b"https://127.0.0.1:1", b"http://[::1]:80"]
)
def test_localhost_stands_for_every_port_of_this_machine(origin: bytes) -> None:
    assert headers(Asked("GET", origin=origin), "localhost")[b"access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin", [b"http://localhost.example.com", b"http://localhost:5173x", b"http://notlocalhost", b"null", CHAT, b""]
)
def test_localhost_stands_for_no_other_machine(origin: bytes) -> None:
    assert b"access-control-allow-origin" not in headers(Asked("GET", origin=origin), "localhost")
