"""Redis for things that may be missing: a call that fails, or is not answered in time, is a miss and never an error.

One connection; a call travels at once, and those that come while it is under way form the next pipeline. The circuit
breaker is the connection itself: the first failure drops it, and every call misses at once until a background task has
a new connection that answers a PING in time. So a call waits for one timeout at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.cache.redis_pipeline import Argument, RedisPipeline
from gateway.metrics import GatewayMetrics
from shared.errors import ConfigError
from shared.log_limit import LogLimit

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


CONNECT_TIMEOUT_S = 1.0
RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0

_FAILURES = (RedisError, OSError, EOFError, TimeoutError, ValueError)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script that runs atomically in Redis."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


class RedisCache:
    """A connection to Redis that never raises. Call `start()` once the event loop runs."""

    def __init__(self, url: str, timeout_s: float, metrics: GatewayMetrics) -> None:
        self._pool = ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            client_name="headrace-gateway",
        )
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._pipeline: RedisPipeline | None = None
        self._broken: AbstractConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry_s = 0.0
        self._log_limit = LogLimit(_logger)

    @property
    def is_available(self) -> bool:
        """Whether calls are tried at all; False while the breaker is open."""
        return self._pipeline is not None

    async def start(self) -> None:
        """Begin connecting, and give a healthy Redis the time to be there from the first request on."""
        self._connecting = asyncio.create_task(self._connect())
        await asyncio.wait([self._connecting], timeout=CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connection; calls made from now on miss."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        await self._discard_broken()
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            await pipeline.connection.disconnect(nowait=True)

    async def get(self, key: str) -> bytes | None:
        """Return a value, or None when there is none or Redis is away."""
        value = await self._call("GET", key)
        await self._delete_if_wrong(value, [key])
        return value if isinstance(value, bytes) else None

    async def set(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Store a value for a while; return False if that failed."""
        reply = await self._call("SET", key, value, "PX", max(1, int(ttl_s * 1000)))
        return bool(reply == b"OK")

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script and return its reply, or None when Redis is away."""
        reply = await self._call("EVALSHA", script.sha, len(keys), *keys, *args)
        if isinstance(reply, NoScriptError):
            reply = await self._call("EVAL", script.source, len(keys), *keys, *args)
        await self._delete_if_wrong(reply, keys)
        return None if isinstance(reply, ResponseError) else reply

    async def _call(self, *command: Argument) -> Any:
        if self._pipeline is None:
            return None
        reply = await self._pipeline.call(command)
        if isinstance(reply, ResponseError) and not isinstance(reply, NoScriptError):
            self._metrics.redis_failures += 1
            self._log_limit.warning(str(command[0]), "redis refused %s: %s", command[0], reply)
        return reply

    async def _delete_if_wrong(self, reply: object, keys: Sequence[str]) -> None:
        """Delete keys of which one holds another type than ours: each call would fail until then."""
        # Before Redis 7 the word stands within the error of a script.
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            await self._call("UNLINK", *keys)

    def _drop_connection(self, pipeline: RedisPipeline, error: BaseException, missed: int) -> None:
        _logger.warning("redis is away (%s): going on without it", str(error) or type(error).__name__)
        if pipeline.has_succeeded:
            self._retry_s = 0.0
        self._metrics.redis_failures += missed
        self._metrics.is_redis_open = True
        self._pipeline = None
        self._broken = pipeline.connection
        self._connecting = asyncio.create_task(self._connect())

    async def _discard_broken(self) -> None:
        broken, self._broken = self._broken, None
        if broken is not None:
            await _discard(broken)

    async def _connect(self) -> None:
        await self._discard_broken()
        while True:
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, 2 * self._retry_s))
            connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                async with asyncio.timeout(self._timeout_s):
                    await connection.send_command("PING")
                    await connection.read_response()
            except _FAILURES as error:
                if not self._metrics.is_redis_open:
                    _logger.warning(
                        "redis cannot be reached (%s): going on without it", str(error) or type(error).__name__
                    )
                self._metrics.is_redis_open = True
                await _discard(connection)
            except BaseException:
                await _discard(connection)
                raise
            else:
                break
        self._pipeline = RedisPipeline(connection, self._timeout_s, self._drop_connection)
        # As loud as that it was away.
        _logger.log(logging.WARNING if self._metrics.is_redis_open else logging.INFO, "redis is connected")
        self._metrics.is_redis_open = False


async def _discard(connection: AbstractConnection) -> None:
    with contextlib.suppress(*_FAILURES):
        await connection.disconnect(nowait=True)
