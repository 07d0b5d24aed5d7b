"""Connections with small handlers behind them, spoken to over raw sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import weakref

import pytest

from gateway.http1.body import MIN_BYTES_PER_S_IN_MEMORY, ClientGoneError
from gateway.http1.connection import MAX_DROPPED_BODY_BYTES, Connection
from gateway.http1.connection_table import ConnectionLimits
from gateway.http1.exchange import Exchange
from gateway.http1.head import MAX_HEAD_BYTES
from tests.gateway.http1.raw_server import (
    REQUEST,
    connected,
    echo,
    never_read,
    read_chunked,
    read_head,
    read_whole,
    served,
    stream_three,
)
from tests.gateway.wire_worker import until

LIMITS = ConnectionLimits()
CHUNKED = b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"


async def flood(writer: asyncio.StreamWriter) -> None:
    for _ in range(1000):
        writer.write(b"x" * (1 << 20))
        await writer.drain()


def num_bytes_held(connection: Connection) -> int:
    body = 0 if connection._exchange is None else len(connection._exchange.body)
    return len(connection._input.data) + body + connection.transport.get_write_buffer_size()


async def test_accepted_connection_has_no_delay() -> None:
    async with served(stream_three) as server, connected(server):
        await until(lambda: server.connections)
        [connection] = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_head_leaves_with_the_first_bytes() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        first = await reader.read(65536)
        assert b"\r\n\r\n5\r\n/x-0;\r\n" in first


async def test_connection_serves_the_next_request_after_a_stream() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            status, headers = await read_head(reader)
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert await read_chunked(reader) == b"/x-0;/x-1;/x-2;end"


async def test_pipelined_requests_are_answered_one_after_the_other() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST + REQUEST.replace(b"/x", b"/y") + REQUEST.replace(b"/x", b"/z"))
        for name in (b"/x", b"/y", b"/z"):
            await read_head(reader)
            assert await read_chunked(reader) == b"".join(b"%b-%d;" % (name, i) for i in range(3)) + b"end"


async def test_any_number_of_pipelined_requests_is_answered_by_a_handler_that_waits_for_nothing() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST * 2000)
        for _ in range(2000):
            assert await read_whole(reader) == (200, b"hi")


async def test_request_that_comes_byte_by_byte_is_served() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        for byte in b"\r\n" + REQUEST:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await read_whole(reader) == (200, b"hi")
        writer.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        async with asyncio.timeout(5):
            assert await read_whole(reader) == (200, b"")


@pytest.mark.parametrize("size", [0, 1, 70_000, 1 << 20])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_of_any_size_arrives_whole(size: int, is_chunked: bool) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    if is_chunked:
        framing = b"Transfer-Encoding: chunked"
        pieces = (body[start : start + 5000] for start in range(0, size, 5000))
        sent = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nX-Trailer: y\r\n\r\n"
    else:
        framing, sent = b"Content-Length: %d" % size, body
    async with served(echo) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\n%b\r\n\r\n%b" % (framing, sent))
            assert await read_whole(reader) == (200, body)


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await read_head(reader)
        assert "transfer-encoding" not in headers
        assert headers["connection"] == "close"
        assert (status, await reader.read()) == (200, b"/x-0;/x-1;/x-2;end")


async def test_answer_to_head_has_a_length_and_no_body() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"POST", b"HEAD") + REQUEST)
        _, headers = await read_head(reader)
        assert headers["content-length"] == "2"
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await reader.read(65536)).endswith(b"\r\n\r\nhi")


async def test_whole_response_has_its_length() -> None:
    async def whole(exchange: Exchange) -> None:
        exchange.respond(201, [(b"x-a", b"b")], b"abc")

    async with served(whole) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            status, headers = await read_head(reader)
            assert (status, headers["content-length"], headers["x-a"]) == (201, "3", "b")
            assert "date" in headers
            assert await reader.readexactly(3) == b"abc"


async def test_closing_header_closes_after_the_stream() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nConnection: close"))
        _, headers = await read_head(reader)
        assert headers["connection"] == "close"
        assert await read_chunked(reader) == b"/x-0;/x-1;/x-2;end"
        assert await reader.read() == b""


async def test_client_that_waits_to_be_told_is_told_when_its_body_is_wanted() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert await read_whole(reader) == (200, b"hi")


async def test_client_that_waits_to_be_told_is_not_told_when_its_body_is_refused() -> None:
    async with served(never_read) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        status, headers = await read_head(reader)
        assert (status, headers["connection"], await reader.read()) == (200, "close", b"ok")


async def test_client_that_leaves_is_noticed_in_mid_stream() -> None:
    gone = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        exchange.on_disconnect = gone.set
        exchange.start(200, [])
        exchange.write(b"x")
        await gone.wait()
        exchange.write(b"into the void")
        exchange.finish()

    async with served(hang) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await read_head(reader)
        writer.transport.abort()
        async with asyncio.timeout(5):
            await gone.wait()


async def test_reader_that_stops_pauses_its_exchange_and_resumes_it() -> None:
    paused, done = asyncio.Event(), asyncio.Event()

    async def overflow(exchange: Exchange) -> None:
        resumed = asyncio.Event()
        exchange.on_writable = resumed.set
        exchange.start(200, [])
        while exchange.paused_since is None:
            exchange.write(b"x" * 65536)
        paused.set()
        await resumed.wait()
        assert exchange.paused_since is None
        exchange.finish(b"end")
        done.set()

    async with served(overflow) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await paused.wait()
        await read_head(reader)
        async with asyncio.timeout(5):
            body = await read_chunked(reader)
            await done.wait()
        assert body.endswith(b"xend")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\nHost: t\r\nX-Big: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\n" + b"".join(b"X-%d: v\r\n" % i for i in range(200)) + b"\r\n",
        b"GET /x HTTP/1.1\r\nHost: t\r\nX-Endless: " + b"a" * (4 * MAX_HEAD_BYTES),
    ],
    ids=["one header", "many headers", "no end"],
)
async def test_head_that_is_too_large_gets_a_431(head: bytes) -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        for start in range(0, len(head), 16384):
            writer.write(head[start : start + 16384])
            await asyncio.sleep(0)
        status, headers = await read_head(reader)
        error = json.loads(await reader.read())["error"]
        assert (status, error["code"], headers["x-request-id"][:4]) == (431, "headers_too_large", "req_")
        assert "date" in headers
        assert set(error) == {"message", "type", "param", "code"}


async def test_head_just_below_the_limit_is_served() -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nX-Big: " + b"a" * (MAX_HEAD_BYTES - 200)))
        assert (await read_head(reader))[0] == 200


@pytest.mark.parametrize(
    ("garbage", "expected"),
    [
        (b"\x16\x03\x01 hello", 400),
        (b"GET /x HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"\r\n" * 100, 400),
        (b"GET / HTTP/2.0\r\nHost: t\r\n\r\n", 505),
    ],
    ids=repr,
)
async def test_bytes_that_are_no_request_are_refused_with_an_id_and_the_four_keys(
    garbage: bytes, expected: int
) -> None:
    async with served(stream_three) as server, connected(server) as (reader, writer):
        writer.write(garbage)
        status, headers = await read_head(reader)
        assert (status, headers["connection"], headers["x-request-id"][:4]) == (expected, "close", "req_")
        error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")


async def test_pipeline_that_is_not_read_stops_being_read_and_goes_on_when_it_is() -> None:
    num_sent, answer = 4000, b"y" * 4000

    async def respond(exchange: Exchange) -> None:
        exchange.respond(200, [], answer)

    async with served(respond) as server, connected(server) as (reader, writer):
        request = b"GET / HTTP/1.1\r\nHost: t\r\nX: %b\r\n\r\n" % (b"x" * 200)
        most_bytes = MAX_HEAD_BYTES + (64 << 10) + len(answer) + 1024
        writer.write(request * num_sent)
        await until(lambda: server.connections)
        [connection] = server.connections
        await until(lambda: connection.paused_since is not None, 30)
        assert num_bytes_held(connection) <= most_bytes
        reader._limit = 1 << 30  # type: ignore[attr-defined]
        for _ in range(num_sent):
            assert await read_whole(reader) == (200, answer)
            assert num_bytes_held(connection) <= most_bytes


async def test_unwanted_body_waits_outside_until_it_is_wanted() -> None:
    wanted = asyncio.Event()

    async def later(exchange: Exchange) -> None:
        await wanted.wait()
        exchange.respond(200, [], b"%d" % len(await exchange.read_body(1 << 20)))

    async with served(later) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        await until(lambda: server.connections)
        [connection] = server.connections
        await until(lambda: num_bytes_held(connection) == MAX_HEAD_BYTES)
        wanted.set()
        assert await read_whole(reader) == (200, b"1000000")


async def test_short_body_that_was_not_read_is_dropped_and_the_connection_goes_on() -> None:
    async with served(never_read) as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % MAX_DROPPED_BODY_BYTES)
            assert await read_whole(reader) == (200, b"ok")
            writer.write(b"x" * MAX_DROPPED_BODY_BYTES)


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
async def test_body_that_goes_on_after_the_answer_is_cut(framing: bytes) -> None:
    async with served(never_read) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\n%b\r\n\r\n" % framing)
        assert (await read_head(reader))[1]["connection"] == "close"
        with pytest.raises(ConnectionError):
            await flood(writer)


@pytest.mark.parametrize(
    "broken", [b"zz\r\n", b"2\r\nhixx", b"5;" + b"x" * 5000, b"0\r\nnot a trailer\r\n\r\n"], ids=repr
)
async def test_broken_chunks_fail_the_reader_with_a_400(broken: bytes) -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + broken)
        status, headers = await read_head(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(await reader.read())["error"]["code"] == "invalid_http"


async def test_handler_that_fails_is_a_500_or_a_cut_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(exchange: Exchange) -> None:
        if exchange.head.path == "/y":
            exchange.start(200, [])
            exchange.write(b"x")
        raise ZeroDivisionError

    async with served(fail) as server:
        async with connected(server) as (reader, writer):
            writer.write(REQUEST)
            assert (await read_head(reader))[0] == 500
            assert json.loads(await reader.read())["error"]["code"] == "internal_error"
        async with connected(server) as (reader, writer):
            writer.write(REQUEST.replace(b"/x", b"/y"))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"\r\n\r\n1\r\nx\r\n")


@pytest.mark.parametrize(
    ("said", "seconds", "code"),
    [
        (b"", LIMITS.head_timeout_s, None),
        (b"\r\n", LIMITS.head_timeout_s, "head_timeout"),
        (b"GET /x HT", LIMITS.head_timeout_s, "head_timeout"),
        (REQUEST[:-1], LIMITS.body_timeout_s, "body_timeout"),
        (
            b"POST /x HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX:",
            LIMITS.body_timeout_s,
            "body_timeout",
        ),
    ],
    ids=["nothing", "an empty line", "half a head", "half a body", "half a trailer"],
)
async def test_client_that_stops_in_the_middle_runs_out_of_time(said: bytes, seconds: float, code: str | None) -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(said)
        await until(lambda: server.connections)
        await server.has_received(len(said))
        server.pass_time(seconds - 1)
        assert len(server.connections) == 1
        server.pass_time(seconds + 1)
        if code is None:
            assert await reader.read() == b""
        else:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code


async def test_large_body_has_the_time_that_its_bytes_so_far_have_earned() -> None:
    sent = MIN_BYTES_PER_S_IN_MEMORY * 10
    head = f"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: {2 * sent}\r\n\r\n".encode()

    async def read(exchange: Exchange) -> None:
        exchange.respond(200, [], b"%d" % len(await exchange.read_body(2 * sent)))

    async with served(read) as server, connected(server) as (reader, writer):
        writer.write(head + bytes(sent))
        await server.has_received(len(head) + sent)
        server.pass_time(LIMITS.body_timeout_s + 9)
        assert not reader.at_eof()
        # What comes goes on to count; a client that stops is given up.
        server.pass_time(LIMITS.body_timeout_s + 11)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"not complete after 40 s" in answer


async def test_large_body_that_comes_slowly_and_steadily_is_read() -> None:
    step, steps = MIN_BYTES_PER_S_IN_MEMORY * 10, 5
    head = f"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: {step * steps}\r\n\r\n".encode()

    async def read(exchange: Exchange) -> None:
        exchange.respond(200, [], b"%d" % len(await exchange.read_body(step * steps)))

    async with served(read) as server, connected(server) as (reader, writer):
        writer.write(head)
        for number in range(1, steps + 1):
            writer.write(bytes(step))
            await server.has_received(len(head) + number * step)
            # Slower than the timeout allows for the whole, faster than the least rate.
            server.pass_time(LIMITS.body_timeout_s + 9.0 * number)
        assert await read_whole(reader) == (200, b"%d" % (step * steps))


@pytest.mark.parametrize(
    "pieces",
    [[REQUEST], [REQUEST[:-2], b"hi"], [b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n"]],
    ids=["whole", "late body", "no body"],
)
async def test_answer_may_take_longer_than_a_client_has_time(pieces: list[bytes]) -> None:
    is_read, may_answer = asyncio.Event(), asyncio.Event()

    async def think(exchange: Exchange) -> None:
        body = await exchange.read_body(1000)
        is_read.set()
        await may_answer.wait()
        exchange.respond(200, [], body)

    async with served(think) as server, connected(server) as (reader, writer):
        num_sent = 0
        for piece in pieces:
            writer.write(piece)
            num_sent += len(piece)
            await server.has_received(num_sent)
        await is_read.wait()
        server.pass_time(LIMITS.body_timeout_s + LIMITS.head_timeout_s + LIMITS.keep_alive_s)
        may_answer.set()
        assert (await read_whole(reader))[0] == 200
        # The client was not too slow, so that its connection goes on.
        writer.write(REQUEST)
        assert await read_whole(reader) == (200, b"hi")


async def test_client_that_leaves_is_noticed_once_its_body_has_made_room_for_more() -> None:
    may_read, has_left = asyncio.Event(), asyncio.Event()

    async def read_late(exchange: Exchange) -> None:
        exchange.on_disconnect = has_left.set
        await may_read.wait()
        await exchange.read_body(1000)
        exchange.start(200, [])
        await has_left.wait()

    async with served(read_late) as server, connected(server) as (_, writer):
        # What is behind the body leaves no room, so that nothing more is read.
        writer.write(REQUEST + b"x" * (MAX_HEAD_BYTES - 2))
        await until(lambda: any(num_bytes_held(c) == MAX_HEAD_BYTES for c in server.connections))
        writer.close()
        may_read.set()
        async with asyncio.timeout(10):
            await has_left.wait()


async def test_answered_connection_may_wait_longer_but_not_for_ever() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await read_whole(reader)
        server.pass_time(LIMITS.keep_alive_s - 1)
        writer.write(REQUEST)
        await read_whole(reader)
        server.pass_time(LIMITS.keep_alive_s + 1)
        assert await reader.read() == b""


async def test_client_that_never_closes_after_the_last_answer_is_cut() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nConnection: close"))
        await reader.read()
        assert len(server.connections) == 1
        server.pass_time(LIMITS.linger_s + 1)
        await until(lambda: not server.connections)


async def test_client_that_never_reads_is_cut() -> None:
    async def long(exchange: Exchange) -> None:
        exchange.start(200, [])
        # More than the system's own buffers grow to: what has just paused the connection may fit into them after all.
        exchange.write(b"x" * (32 << 20))
        exchange.finish()

    async with served(long) as server, connected(server) as (_, writer):
        writer.write(REQUEST)
        await until(lambda: any(connection.paused_since is not None for connection in server.connections))
        server.pass_time(LIMITS.send_timeout_s - 1)
        assert len(server.connections) == 1
        [connection] = server.connections
        # What the gateway stood still is not the client's time.
        connection.postpone(60.0)
        server.pass_time(LIMITS.send_timeout_s + 50)
        assert not connection.transport.is_closing()
        server.pass_time(LIMITS.send_timeout_s + 61)
        await until(lambda: not server.connections)


async def test_ended_connection_is_freed_without_the_collector(no_collector: None) -> None:
    freed: list[weakref.ref[Connection] | weakref.ref[Exchange]] = []

    async def respond(exchange: Exchange) -> None:
        body = await exchange.read_body(100)
        exchange.respond(200, [], body)

    num_bytes = 0
    async with served(respond) as server:
        for ending in (b"", b"GET / HT", b"nonsense", b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n\r\n"):
            async with connected(server) as (reader, writer):
                writer.write(REQUEST)
                await read_whole(reader)
                freed += [weakref.ref(connection) for connection in server.connections]
                writer.write(ending)
                num_bytes += len(REQUEST + ending)
                await server.has_received(num_bytes)
            await until(lambda: not server.connections)
    await asyncio.sleep(0)
    assert len(freed) == 4
    assert [reference() for reference in freed] == [None] * 4


async def test_body_that_never_ends_does_not_outlive_an_answer_that_had_begun() -> None:
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"a")
        await go_on.wait()
        exchange.finish(b"b")

    async with served(answer) as server, connected(server) as (reader, writer):
        writer.write(REQUEST[:-1])
        await read_head(reader)
        server.pass_time(LIMITS.body_timeout_s + 1)
        go_on.set()
        assert await read_chunked(reader) == b"ab"
        assert await reader.read() == b""


async def test_client_that_half_closes_is_taken_to_have_left() -> None:
    gone = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        exchange.on_disconnect = gone.set
        await gone.wait()

    async with served(hang) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        writer.write_eof()
        async with asyncio.timeout(5):
            await gone.wait()
            assert await reader.read() == b""


async def test_client_that_sends_its_body_at_once_is_not_told_to() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: t", b"Host: t\r\nExpect: 100-continue"))
        assert await read_whole(reader) == (200, b"hi")


async def test_bodies_that_are_not_read_do_not_delay_what_is_behind_them() -> None:
    async with served(never_read) as server, connected(server) as (reader, writer):
        writer.write(REQUEST * 3)
        async with asyncio.timeout(5):
            for _ in range(3):
                assert await read_whole(reader) == (200, b"ok")


async def test_half_of_a_second_head_has_no_more_time_than_half_of_the_first() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await read_whole(reader)
        writer.write(b"GET /x HT")
        await server.has_received(len(REQUEST + b"GET /x HT"))
        server.pass_time(LIMITS.head_timeout_s + 1)
        async with asyncio.timeout(5):
            assert (await read_head(reader))[0] == 408


async def test_drops_of_a_second_head_do_not_extend_its_time() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        writer.write(REQUEST)
        await read_whole(reader)
        [connection] = server.connections
        deadlines = []
        for number, piece in enumerate((b"GE", b"T ", b"/x"), 1):
            writer.write(piece)
            await server.has_received(len(REQUEST) + 2 * number)
            deadlines.append(connection._deadline)
        assert len(set(deadlines)) == 1


async def test_time_in_which_the_gateway_stood_still_is_not_the_clients() -> None:
    async with served(echo) as server, connected(server) as (reader, _):
        await until(lambda: server.connections)
        [connection] = server.connections
        connection.postpone(60)
        server.pass_time(LIMITS.head_timeout_s + 30)
        assert not connection.transport.is_closing()
        server.pass_time(LIMITS.head_timeout_s + 61)
        assert await reader.read() == b""


async def test_body_that_had_stopped_being_read_is_dropped_after_the_last_answer() -> None:
    is_full = asyncio.Event()

    async def refuse(exchange: Exchange) -> None:
        await is_full.wait()
        exchange.respond(413, [], b"no")

    size = 12 << 20
    async with served(refuse) as server, connected(server) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        await until(lambda: any(num_bytes_held(c) == MAX_HEAD_BYTES for c in server.connections))
        has_unread = any(connection.has_unread_bytes() for connection in server.connections)
        is_full.set()
        async with asyncio.timeout(10):
            await writer.drain()
            assert (await reader.read()).endswith(b"\r\n\r\nno")
    # The kernel held more, and not because there was no time to read it.
    assert not has_unread


async def test_evicted_connection_does_not_wait_for_its_reader() -> None:
    async def answer_much(exchange: Exchange) -> None:
        exchange.respond(200, [], b"x" * (32 << 20))

    async with served(answer_much) as server, connected(server) as (_, writer):
        writer.write(REQUEST)
        await until(lambda: any(c.paused_since is not None for c in server.connections))
        [connection] = server.connections
        connection.evict()
        await until(lambda: not server.connections)


async def test_connection_knows_of_bytes_that_it_has_not_read() -> None:
    async with served(echo) as server, connected(server) as (reader, writer):
        await until(lambda: bool(server.connections))
        [connection] = server.connections
        assert not connection.has_unread_bytes()
        # Past the event loop, which has no time to read before the next line.
        os.write(writer.get_extra_info("socket").fileno(), REQUEST)
        assert connection.has_unread_bytes()
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert not connection.has_unread_bytes()
        # Behind its end there is no socket to ask.
        writer.close()
        await until(lambda: connection.transport.get_extra_info("socket").fileno() < 0)
        assert not connection.has_unread_bytes()


async def test_reader_of_a_body_is_told_that_its_client_left() -> None:
    gone = asyncio.Event()

    async def read(exchange: Exchange) -> None:
        with pytest.raises(ClientGoneError):
            await exchange.read_body(100)
        gone.set()

    async with served(read) as server:
        async with connected(server) as (_, writer):
            writer.write(REQUEST[:-1])
            await server.has_received(len(REQUEST) - 1)
        async with asyncio.timeout(5):
            await gone.wait()
