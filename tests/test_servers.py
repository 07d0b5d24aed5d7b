import os
import socket
from collections.abc import Callable

import nats
import pytest

from tests.servers import NatsServer, RedisServer


def _ping_redis(server: RedisServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=2) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(16)


async def test_restarted_nats_keeps_its_port_and_its_streams(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    url = server.url
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="S", subjects=["s"])
    await client.close()
    server.restart()
    assert server.url == url
    client = await nats.connect(url)
    assert (await client.jetstream().stream_info("S")).config.name == "S"
    await client.close()


def test_killed_server_is_gone(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis()
    assert _ping_redis(server) == b"+PONG\r\n"
    server.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    server.restart()
    assert _ping_redis(server) == b"+PONG\r\n"


def test_session_servers_answer(nats_url: str, redis_server: RedisServer) -> None:
    assert nats_url.startswith("nats://127.0.0.1:")
    assert _ping_redis(redis_server) == b"+PONG\r\n"
