"""The Redis client against a real server: batching, misses instead of errors, recovery."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import BusyLoadingError, NoScriptError, ResponseError

from gateway.cache.redis_client import RETRY_MAX_S, RedisCache, Script, check_redis_url
from gateway.cache.redis_pipeline import MAX_LINE_BYTES, Reply, ReplyParser
from gateway.metrics import GatewayMetrics
from shared.errors import ConfigError
from tests.gateway.wire_worker import until
from tests.servers import RedisServer

# So long that only a Redis that does not answer at all needs it, on a busy machine too.
TIMEOUT_S = 5.0
SHORT_S = 0.2


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


@pytest.fixture
async def cache(redis_url: str, metrics: GatewayMetrics) -> AsyncIterator[RedisCache]:
    cache = RedisCache(redis_url, TIMEOUT_S, metrics)
    await cache.start()
    yield cache
    await cache.close()


async def until_stored(cache: RedisCache, key: str, value: bytes) -> None:
    for _ in range(500):
        if await cache.set(key, value, 60) and await cache.get(key) == value:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the value was not stored")


async def test_value_that_was_set_is_read_back_until_it_expires(cache: RedisCache) -> None:
    assert await cache.set("rc:a", b"\x00value", 60)
    assert await cache.get("rc:a") == b"\x00value"
    assert await cache.set("rc:a", b"\x00value", 0.05)
    for _ in range(500):
        if await cache.get("rc:a") is None:
            break
        await asyncio.sleep(0.01)
    assert await cache.get("rc:a") is None
    assert cache.is_available


async def test_concurrent_calls_each_get_their_own_reply(cache: RedisCache) -> None:
    await asyncio.gather(*(cache.set(f"rc:{i}", b"%d" % i, 5) for i in range(300)))
    values = await asyncio.gather(*(cache.get(f"rc:{i}") for i in range(301)))
    assert values == [*(b"%d" % i for i in range(300)), None]


async def test_concurrent_gets_travel_in_few_pipelines(cache: RedisCache, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    assert cache._pipeline is not None
    pack = cache._pipeline.connection.pack_commands

    def counted(commands: list[object]) -> list[bytes]:
        sizes.append(len(commands))
        return pack(commands)

    monkeypatch.setattr(cache._pipeline.connection, "pack_commands", counted)
    await asyncio.gather(*(cache.get(f"rc:none{i}") for i in range(64)))
    assert sizes == [1, 63]


async def test_script_unknown_to_redis_is_sent_and_then_cached(cache: RedisCache) -> None:
    script = Script(f"return {{KEYS[1], ARGV[1], {time.time_ns()}}}")
    first = await cache.run_script(script, ["k"], ["v"])
    assert first[:2] == [b"k", b"v"]
    assert await cache.run_script(script, ["k"], ["v"]) == first


async def test_refused_command_is_a_miss_and_the_connection_stays(cache: RedisCache, metrics: GatewayMetrics) -> None:
    assert await cache.run_script(Script("return redis.call('nonsense')"), [], []) is None
    assert cache.is_available
    assert metrics.redis_failures == 1
    assert await cache.set("rc:b", b"1", 5)


async def test_cancelled_caller_does_not_disturb_the_others(cache: RedisCache) -> None:
    await cache.set("rc:c", b"3", 5)
    doomed = asyncio.create_task(cache.get("rc:c"))
    kept = asyncio.create_task(cache.get("rc:c"))
    await asyncio.sleep(0)
    doomed.cancel()
    assert await kept == b"3"
    assert await cache.get("rc:c") == b"3"


async def test_redis_that_is_not_there_is_a_miss(metrics: GatewayMetrics, caplog: pytest.LogCaptureFixture) -> None:
    cache = RedisCache("redis://127.0.0.1:1", TIMEOUT_S, metrics)
    await cache.start()
    assert await cache.get("a") is None
    assert not await cache.set("a", b"", 1)
    assert await cache.run_script(Script("return 1"), [], []) is None
    assert metrics.is_redis_open
    assert [message.count("redis cannot be reached") for message in caplog.messages] == [1]
    await cache.close()


async def test_redis_that_is_not_there_is_tried_again_soon_and_then_ever_more_seldom(
    metrics: GatewayMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("gateway.cache.redis_client.asyncio.sleep", noted)
    cache = RedisCache("redis://127.0.0.1:1", TIMEOUT_S, metrics)
    starting = asyncio.create_task(cache.start())
    async with asyncio.timeout(30):
        while len(waits) < 8:
            await sleep(0.001)
    await cache.close()
    await starting
    assert waits[:8] == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, RETRY_MAX_S, RETRY_MAX_S]


async def test_redis_that_takes_connections_and_answers_none_is_told_by_its_failure(
    metrics: GatewayMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    # The kernel accepts for it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        cache = RedisCache(f"redis://127.0.0.1:{server.getsockname()[1]}", 0.01, metrics)
        await cache.start()
        await until(lambda: caplog.messages)
        await cache.close()
    assert "redis cannot be reached (TimeoutError)" in caplog.messages[0]


async def test_redis_killed_and_started_again_recovers_by_itself(
    start_redis: Callable[..., RedisServer], metrics: GatewayMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis()
    cache = RedisCache(server.url, TIMEOUT_S, metrics)
    await cache.start()
    assert await cache.set("a", b"1", 60)
    server.kill()
    assert await asyncio.gather(*(cache.get("a") for _ in range(50))) == [None] * 50
    assert metrics.is_redis_open
    assert metrics.redis_failures >= 50
    assert "redis is away" in caplog.messages[0]
    server.start()
    await until(lambda: cache.is_available)
    assert caplog.messages[-1] == "redis is connected"
    assert await cache.set("a", b"2", 60)
    assert await cache.get("a") == b"2"
    assert not metrics.is_redis_open
    await cache.close()


async def test_frozen_redis_costs_one_timeout_and_then_nothing(
    start_redis: Callable[..., RedisServer], metrics: GatewayMetrics
) -> None:
    server = start_redis()
    cache = RedisCache(server.url, SHORT_S, metrics)
    await cache.start()
    # While the machine does other things, this may need several tries.
    await until_stored(cache, "a", b"1")
    server.pause()
    begin = time.monotonic()
    for _ in range(101):
        assert await cache.get("a") is None
    # A hundred more timeouts would take twice as long as this.
    assert SHORT_S <= time.monotonic() - begin < 50 * SHORT_S
    server.resume()
    await until_stored(cache, "a", b"1")
    await cache.close()


async def lying_server(reply: bytes) -> asyncio.Server:
    """Start a server that greets like Redis and says `reply` to everything else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                is_greeting = words[0] in (b"PING", b"CLIENT", b"SELECT", b"HELLO")
                writer.write(b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n" if is_greeting else reply)
                await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize("reply", [b"*1\r\n" * 100_000 + b":1\r\n$1\r\nx\r\n", b"$x\r\n", b"\xff\r\n", b":1e9\r\n"])
async def test_reply_that_cannot_be_parsed_is_a_miss_at_once_and_answers_no_other_call(
    metrics: GatewayMetrics, reply: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with await lying_server(reply) as server:
        cache = RedisCache(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", TIMEOUT_S, metrics)
        await cache.start()
        await until(lambda: cache.is_available)
        pipeline = cache._pipeline
        assert await cache.get("rc:a") is None
        assert cache._pipeline is not pipeline
        await until(lambda: cache.is_available)
        assert await cache.get("rc:b") is None
        await cache.close()
    assert "redis is away" in caplog.text
    assert "no reply in time" not in caplog.text


async def test_command_that_cannot_be_sent_is_a_miss_like_those_beside_it(cache: RedisCache) -> None:
    unsendable = cache.run_script(Script("return 1"), ["rc:a"], [None])  # type: ignore[list-item]
    assert await asyncio.gather(unsendable, cache.get("rc:a")) == [None, None]
    await until_stored(cache, "rc:a", b"1")


@pytest.mark.parametrize("kind", ["list", "hash", "set"])
async def test_entry_of_a_wrong_type_is_a_miss_once(cache: RedisCache, metrics: GatewayMetrics, kind: str) -> None:
    write = {"list": ("RPUSH", "x"), "hash": ("HSET", "f", "x"), "set": ("SADD", "x")}[kind]
    count = Script("return redis.call('INCR', KEYS[1])")
    for key in ("rc:wrong", "rc:wrong-count"):
        assert await cache._call(write[0], key, *write[1:]) == 1
    assert await cache.get("rc:wrong") is None
    assert await cache._call("EXISTS", "rc:wrong") == 0
    assert await cache.run_script(count, ["rc:wrong-count"], []) is None
    assert await cache.run_script(count, ["rc:wrong-count"], []) == 1
    assert metrics.redis_failures == 2
    await cache._call("UNLINK", "rc:wrong-count")


_replies = st.recursive(
    st.none() | st.integers() | st.binary(max_size=40), lambda inner: st.lists(inner, max_size=4), max_leaves=8
)


def encoded(reply: object) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


@given(st.lists(_replies, max_size=5), st.integers(1, 50))
def test_replies_in_any_pieces_are_the_same(replies: list[object], size: int) -> None:
    parser = ReplyParser()
    stream = b"".join(map(encoded, replies))
    found: list[Reply] = []
    for start in range(0, len(stream), size):
        found += parser.feed(stream[start : start + size])
    assert found == replies
    assert not parser._data


def test_errors_are_values_of_their_kind() -> None:
    stream = b"+OK\r\n-NOSCRIPT none\r\n-ERR wrong\r\n-LOADING wait\r\n*-1\r\n"
    done, unknown, refused, loading, nothing = ReplyParser().feed(stream)
    assert (done, nothing) == (b"OK", None)
    assert isinstance(unknown, NoScriptError)
    assert isinstance(refused, ResponseError)
    assert str(refused) == "ERR wrong"
    assert isinstance(loading, BusyLoadingError)


@pytest.mark.parametrize(
    "stream",
    [b"?1\r\n", b"$x\r\n", b"$1\r\nxyz", b":1e9\r\n", b"*1\r\n" * 50, b"+" + b"x" * MAX_LINE_BYTES],
    ids=["kind", "length", "longer", "number", "deep", "line"],
)
def test_bytes_that_are_no_reply_are_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        ReplyParser().feed(stream)


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "redis://127.0.0.1:6379",
        "redis://:secret@host:6379/2",
        "rediss://host?ssl_cert_reqs=none",
        "unix:///run/redis.sock",
    ],
)
def test_url_that_the_client_can_use_is_accepted(url: str | None) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "begins with none of redis://, rediss:// and unix://"),
        ("redis://host:port", "has no host and port that can be told"),
        ("redis://:5#cret@host:6379/0", "has something behind its host and port that is not a number of a database"),
        ("redis://:se/cret@host:6379", "has no host and port that can be told"),
        ("redis://host/secret", "has something behind its host and port that is not a number of a database"),
        ("redis://host?secret=1", "has an option behind its ? that cannot be used: secret"),
    ],
)
def test_url_that_the_client_cannot_use_is_refused_without_its_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_redis_url(url)
    assert "HEADRACE_REDIS_URL" in str(refusal.value)
    assert message in str(refusal.value)
    assert "cret@" not in str(refusal.value)
