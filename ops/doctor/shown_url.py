"""URLs as they may be shown to strangers: without logins, and without queries, which hold passwords and keys too."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
# A list of servers; a comma within a password is followed by no scheme.
_BETWEEN = re.compile(r",\s*(?=[a-z][a-z0-9+.-]*://)")


def shown_url(text: str) -> str:
    """Return URLs, or hosts, without what may be secret in them, however badly they are written."""
    return ",".join(_shown(part) for part in _BETWEEN.split(text))


def place_of(text: str) -> str:
    """Return the hosts and ports of URLs alone."""
    places = [shown.rpartition("://")[2] for shown in shown_url(text).split(",")]
    return ", ".join(place.removeprefix(f"{HIDDEN}@") for place in places)


def _shown(url: str) -> str:
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    login, _, place = rest.rpartition("@")
    if "?" in login:
        # Either may hold the other's sign: where the login ends cannot be told.
        return f"{scheme}{separator}{HIDDEN}"
    place, has_query, _ = place.partition("?")
    return f"{scheme}{separator}{HIDDEN + '@' if login else ''}{place}{'?' + HIDDEN if has_query else ''}"
