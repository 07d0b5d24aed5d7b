"""The proxy between parts: what each state of a link does to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ops.chaos.fault_proxy import FaultProxy, LinkState

SHORT_S = 0.1


BYTES_PER_S = 20_000


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    proxy = FaultProxy(server.sockets[0].getsockname()[1], bytes_per_s=BYTES_PER_S)
    await proxy.start()
    yield proxy
    await proxy.close()
    server.close()


async def _connect(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    return reader, writer


@pytest.mark.parametrize("state", [LinkState.PARTITIONED, LinkState.HALF_OPEN, LinkState.MUTE])
async def test_bytes_kept_back_by_a_partition_arrive_when_it_heals(proxy: FaultProxy, state: LinkState) -> None:
    reader, writer = await _connect(proxy)
    await proxy.set(state)
    writer.write(b"b")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(1), SHORT_S)
    await proxy.set(LinkState.WHOLE)
    assert await reader.readexactly(1) == b"b"
    writer.transport.abort()


async def test_cut_link_ends_connections_refuses_new_ones_and_comes_back(proxy: FaultProxy) -> None:
    reader, writer = await _connect(proxy)
    await proxy.set(LinkState.CUT)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.transport.abort()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    await proxy.set(LinkState.WHOLE)
    _, writer = await _connect(proxy)
    writer.transport.abort()


async def test_slow_link_delays_each_piece(proxy: FaultProxy) -> None:
    reader, writer = await _connect(proxy)
    await proxy.set(LinkState.SLOW)
    began = asyncio.get_running_loop().time()
    writer.write(b"b")
    assert await reader.readexactly(1) == b"b"
    assert asyncio.get_running_loop().time() - began > SHORT_S * 0.9  # there and back
    writer.transport.abort()


@pytest.mark.parametrize(("state", "is_heard"), [(LinkState.HALF_OPEN, True), (LinkState.MUTE, False)])
async def test_link_that_passes_one_way_lets_the_server_hear_or_be_heard(state: LinkState, is_heard: bool) -> None:
    heard = asyncio.Event()
    said = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        await said.wait()
        writer.write(b"b")
        if await reader.read(1):
            heard.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = FaultProxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    reader, writer = await _connect(proxy)
    await proxy.set(state)
    writer.write(b"b")
    said.set()
    # What comes through is waited for, and what does not has had as long.
    came, stayed = (heard.wait(), reader.readexactly(1)) if is_heard else (reader.readexactly(1), heard.wait())
    await asyncio.wait_for(came, 5.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stayed, SHORT_S)
    writer.transport.abort()
    await proxy.close()
    server.close()


async def test_narrow_link_passes_so_many_bytes_a_second_and_keeps_little(proxy: FaultProxy) -> None:
    reader, writer = await _connect(proxy)
    await proxy.set(LinkState.NARROW)
    loop = asyncio.get_running_loop()
    began = loop.time()
    writer.write(bytes(BYTES_PER_S // 10))
    await reader.readexactly(BYTES_PER_S // 10)
    # Both directions pass at the same time, a segment apart.
    assert 0.1 <= loop.time() - began < 2.0
    writer.write(bytes(1 << 20))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), SHORT_S)
    writer.transport.abort()
