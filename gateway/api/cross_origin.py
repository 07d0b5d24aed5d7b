"""What browsers ask before a page of another origin may read an answer (CORS). Off unless origins are named.

Keys are shown in a header that a page has to know, never in cookies, so no credentials are allowed.

Source: the Fetch standard, section "CORS protocol".
"""

from __future__ import annotations

import re

from gateway.http1.exchange import Exchange, Headers
from shared.errors import ConfigError

_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_LOCAL_ORIGIN = re.compile(rb"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
_MAX_AGE_S = 600
_EXPOSED = (
    b"x-request-id, openai-processing-ms, retry-after, x-headrace-place, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


class CrossOrigin:
    """The origins whose pages may read answers."""

    def __init__(self, origins: str) -> None:
        """Allow these origins, separated by commas; `localhost` stands for every port of this machine.

        Raises:
            ConfigError: One of them is not an origin.
        """
        named = [origin.strip() for origin in origins.split(",") if origin.strip()]
        self._allows_local = "localhost" in named
        named = [origin for origin in named if origin != "localhost"]
        for origin in named:
            if not _ORIGIN.fullmatch(origin):
                problem = f"{origin!r} is not an origin; write https://chat.example.com, with its port, or localhost"
                raise ConfigError("HEADRACE_CORS_ORIGINS", problem)
        self._origins = frozenset(origin.encode() for origin in named)
        self._is_on = bool(named) or self._allows_local

    def answer_headers(self, exchange: Exchange) -> Headers:
        """Return what every answer to this request carries besides its own headers."""
        if not self._is_on:
            return ()
        origin = _header(exchange, b"origin")
        # A shared cache must not give one origin's answer to another.
        if not self._allows(origin):
            return ((b"vary", b"origin"),)
        return (
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
        )

    def answer_preflight(self, exchange: Exchange) -> bool:
        """Answer a browser's question whether a page may make a request; return False for any other request."""
        if exchange.head.method != "OPTIONS" or not self._is_on:
            return False
        method = _header(exchange, b"access-control-request-method")
        if not method or not self._allows(_header(exchange, b"origin")):
            return False
        allowed = (
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", _header(exchange, b"access-control-request-headers")),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        )
        exchange.respond(204, allowed, b"")
        return True

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or (self._allows_local and _LOCAL_ORIGIN.fullmatch(origin) is not None)


def _header(exchange: Exchange, name: bytes) -> bytes:
    return next((value for key, value in exchange.head.headers if key == name), b"")
