"""What a URL of a server that speaks HTTP may be."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_http_url(url: str) -> bool:
    """Return whether a text begins with http:// or https:// and names a host, and a port that can be connected to."""
    try:
        place = urlsplit(url)
        return place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:
        # The port is not a number, or an IPv6 address lacks a bracket.
        return False
