"""What URLs may be: of NATS, one server or several with commas, each with a login or without, and of HTTP servers."""

from __future__ import annotations

from urllib.parse import SplitResult, quote, unquote, urlsplit

from shared.errors import ConfigError

_VARIABLE = "HEADRACE_NATS_URL"
_SCHEMES = ("nats", "tls")
_FORMS = (
    "write nats://host:4222, an IPv6 address in brackets (nats://[::1]:4222), several servers with commas between "
    "them, and in a password / ? # @ , as %2F %3F %23 %40 %2C"
)


def check_url(url: str) -> None:
    """Raise `ConfigError`, which quotes no password, for a URL that is none of NATS, or without a host and port."""
    parts = url.split(",")
    for number, part in enumerate(parts, 1):
        scheme, mark, _ = part.strip().partition("://")
        if mark and scheme not in _SCHEMES:
            raise ConfigError(_VARIABLE, f"begins with {scheme[:20]}://; allowed: {', '.join(_SCHEMES)}")
        if not _is_place(part):
            which = "" if len(parts) == 1 else f"server {number} of it "
            raise ConfigError(_VARIABLE, f"{which}is not a host and port; {_FORMS}")


def login_in(url: str) -> tuple[str, str] | None:
    """Return the user and password of a URL that passes `check_url`; None where it has none, or has several.

    The library would send them as they are written, `%2F` for a slash, and to no server of a cluster that the URL does
    not name.
    """
    places = map(_split, url.split(","))
    logins = {(unquote(place.username or ""), unquote(place.password)) for place in places if place.password}
    return logins.pop() if len(logins) == 1 else None


def _is_place(part: str) -> bool:
    """Return whether a part is a host, with nothing behind its port: that would be the rest of an unquoted password."""
    try:
        place = _split(part)
        _ = place.port
    except ValueError:
        return False
    return bool(place.hostname) and place.path in ("", "/") and not place.query and not place.fragment


def _split(part: str) -> SplitResult:
    part = part.strip()
    return urlsplit(part if "://" in part else f"nats://{part}")


def with_login(url: str, user: str, password: str) -> str:
    """Return URLs of NATS servers, separated by commas, with this login in each."""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    parts = [part.strip().rpartition("://") for part in url.split(",")]
    return ",".join(
        f"{scheme if mark else 'nats'}://{login}@{place.rpartition('@')[2]}" for scheme, mark, place in parts
    )


def is_http_url(url: str) -> bool:
    """Return whether a text begins with http:// or https:// and names a host, and a port that can be connected to."""
    try:
        place = urlsplit(url)
        return place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:
        # The port is not a number, or an IPv6 address lacks a bracket.
        return False
