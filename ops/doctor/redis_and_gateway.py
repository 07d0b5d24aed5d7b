"""Redis and a gateway: whether they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from gateway.cache.redis_url import check_redis_url
from ops.doctor.finding import Finding, problem, warning
from ops.doctor.settings import place_of, shown_url
from shared.errors import ConfigError
from shared.urls import is_http_url


async def redis_finding(url: str | None) -> Finding:
    """Connect to Redis once."""
    if url is None:
        return Finding("redis", "not used: no shared cache, limits count per gateway")
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    try:
        check_redis_url(url)
    except ConfigError as error:
        # Gateways that are given it do not start.
        return problem("redis", f"its URL {error.problem}", "correct HEADRACE_REDIS_URL")
    place = place_of(url)
    try:
        async with Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as redis:
            began = time.monotonic()
            await redis.ping()
            text = f"{place} answers in {(time.monotonic() - began) * 1e3:.1f} ms"
            return Finding("redis", text)
    except (RedisError, OSError) as error:
        remedy = "start it, or check HEADRACE_REDIS_URL and its password; requests are served without it"
        return warning("redis", f"{place} cannot be used: {error}", remedy)


def gateway_findings(url: str) -> Iterator[Finding]:
    """Ask a gateway whether it is ready."""
    import http.client

    shown = shown_url(url)
    if not is_http_url(url):
        yield problem("gateway", f"{shown} is no URL of a server", "give HEADRACE_URL as http://host:port")
        return
    place = urlsplit(url)
    kind: Any = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname, place.port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        body = response.read(300).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        yield problem("gateway", f"{shown} does not answer: {error}", "start it, or give --url of one that runs")
        return
    finally:
        connection.close()
    if response.status == http.client.OK:
        yield Finding("gateway", f"{shown} is ready")
    else:
        told = f"{shown} is not ready ({response.status}): {body}"
        yield problem("gateway", told, "see `nats` above" if "no_queue" in body else "see `workers` above")
