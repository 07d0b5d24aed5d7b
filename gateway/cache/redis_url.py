"""What the URL of Redis may be. Its errors quote nothing of it: there may be a password anywhere."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from shared.errors import ConfigError

_VARIABLE = "HEADRACE_REDIS_URL"
_SCHEMES = ("redis", "rediss", "unix")
_DATABASE = re.compile(r"(/\d*)?")
_QUOTED = re.compile(r"'(\w+)'")
_FORMS = (
    "write redis://:password@host:6379/0, an IPv6 address in brackets (redis://[::1]:6379), and in a password / ? # @ "
    "as %2F %3F %23 %40"
)


def check_redis_url(url: str | None) -> None:
    """Refuse a URL that the client of Redis could not use by a `ConfigError`; None is none."""
    if not url:
        return
    if not url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        raise ConfigError(_VARIABLE, "begins with none of redis://, rediss:// and unix://")
    try:
        place = urlsplit(url)
        _ = place.port
    except ValueError:
        raise ConfigError(_VARIABLE, f"has no host and port that can be told; {_FORMS}") from None
    if place.fragment or (place.scheme != "unix" and not _DATABASE.fullmatch(place.path)):
        # The client itself would take database 0 of a host that is a part of the password.
        raise ConfigError(
            _VARIABLE, f"has something behind its host and port that is not a number of a database; {_FORMS}"
        )
    if place.query:
        _check_options(url)


def _check_options(url: str) -> None:
    from redis.asyncio.connection import ConnectionPool

    try:
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        # Either has the name of the option last in quotes, and no value.
        name = (_QUOTED.findall(str(error)) or ["one"])[-1]
        raise ConfigError(_VARIABLE, f"has an option behind its ? that cannot be used: {name}") from None
