"""The short ways of the client lead where the library's long ones do: nothing lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, ConnectionReconnectingError, FlushTimeoutError, OutboundBufferLimitError

from shared.direct_client import MAX_UNSENT_BYTES, DirectClient
from shared.nats_connection import connect
from tests.servers import NatsServer
from tests.waiting import until


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[DirectClient]:
    client = await connect(nats_url, role="worker", name="w")
    yield client
    await client.close()


@pytest.fixture
def server(start_nats: Callable[..., NatsServer]) -> NatsServer:
    """A server of the test's own, to kill or to freeze."""
    return start_nats()


@pytest.fixture
async def guest(server: NatsServer) -> AsyncIterator[DirectClient]:
    client = await connect(server.url, role="gateway", name="g")
    yield client
    await client.close()


async def received_by(client: DirectClient) -> list[bytes]:
    """Return a list of what comes in on the subject `s`."""
    received: list[bytes] = []
    await client.subscribe_direct("s", lambda message: received.append(message.data))
    return received


def transport_of(client: DirectClient) -> asyncio.Transport:
    transport = client._socket_transport()
    assert transport is not None
    return transport


async def fill(client: DirectClient, subject: str) -> int:
    """Publish numbered messages until the connection takes no more, and one more; return how many."""
    number = 0
    while client.is_writable:
        while client.is_writable:
            client.send(subject, b"%06d" % number + bytes(16 << 10))
            number += 1
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # the kernel may still find room
    client.send(subject, b"%06d" % number)
    return number + 1


async def test_messages_of_all_sizes_arrive_once_in_order_with_their_replies(client: DirectClient) -> None:
    received: list[tuple[str, str, bytes]] = []
    await client.subscribe_direct(
        "s.*", lambda message: received.append((message.subject, message.reply, message.data))
    )
    # Some fit a packet many times, some take several.
    sent = [(f"s.{n}", f"r.{n}" if n % 3 else "", bytes([n % 251]) * (n * 977 % 90_000)) for n in range(200)]
    for subject, reply, payload in sent:
        client.send(subject, payload, reply)
        if len(client._pending) > 8:
            await client.wait_writable()
            await asyncio.sleep(0)
    await until(lambda: len(received) >= len(sent))
    assert received == sent


async def test_messages_with_headers_and_of_other_subscriptions_come_too(client: DirectClient) -> None:
    direct: list[Msg] = []
    other: list[bytes] = []

    async def receive(message: Msg) -> None:
        other.append(message.data)

    await client.subscribe_direct("d", direct.append)
    await client.subscribe("o", cb=receive)
    for n in range(50):
        await client.publish("d", b"%d" % n, headers={"n": str(n)} if n % 2 else None)
        await client.publish("o", b"%d" % n)
    await until(lambda: len(direct) == len(other) == 50)
    assert [message.data for message in direct] == other == [b"%d" % n for n in range(50)]
    assert direct[1].headers == {"n": "1"}


async def test_bytes_in_any_pieces_give_the_same_messages(client: DirectClient) -> None:
    received: list[bytes] = []
    subscription = await client.subscribe_direct("s", lambda message: received.append(message.data))
    stream = b"".join(b"MSG s %d %d\r\n%b\r\n" % (subscription._id, n, b"\r\nMSG s 1 0\r\n"[:n]) for n in range(12))
    transport = transport_of(client)
    tap = transport.get_protocol()
    assert isinstance(tap, asyncio.Protocol)
    for size in range(1, len(stream) + 1):
        received.clear()
        for start in range(0, len(stream), size):
            tap.data_received(stream[start : start + size])
        await until(lambda: len(received) == 12)
        assert received == [b"\r\nMSG s 1 0\r\n"[:n] for n in range(12)]


async def test_handler_that_raises_costs_its_message_alone(
    client: DirectClient, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []

    def handle(message: Msg) -> None:
        received.append(message.data)
        if message.data == b"bad":
            raise ValueError("no")

    await client.subscribe_direct("s", handle)
    for payload in (b"good", b"bad", b"fine"):
        client.send("s", payload)
    await until(lambda: len(received) == 3)
    assert "could not be handled" in caplog.text


async def test_first_publication_of_a_turn_is_written_at_once_and_the_others_together(client: DirectClient) -> None:
    received = await received_by(client)
    await asyncio.sleep(0.01)
    await client.publish("s", b"0")
    assert not client._pending
    for n in range(1, 50):
        client.send("s", b"%d" % n)
    assert len(client._pending) == 49
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not client._pending
    await until(lambda: len(received) == 50)
    assert received == [b"%d" % n for n in range(50)]


async def test_turn_whose_publications_are_to_be_written_together_ends_with_one_write(client: DirectClient) -> None:
    received = await received_by(client)
    await asyncio.sleep(0.01)
    client.write_at_end_of_turn()
    for n in range(3):
        client.send("s", b"%d" % n)
    assert len(client._pending) == 3
    await asyncio.sleep(0)
    assert not client._pending
    client.send("s", b"3")
    assert not client._pending
    await until(lambda: len(received) == 4)
    assert received == [b"0", b"1", b"2", b"3"]


async def test_flush_waits_for_everything_that_was_published_before(client: DirectClient) -> None:
    received = await received_by(client)
    await asyncio.sleep(0.01)
    for n in range(3):
        client.send("s", b"%d" % n)
    await client.flush()
    assert received == [b"0", b"1", b"2"]


async def test_flush_waits_for_what_a_server_that_does_not_read_has_not_taken_yet(
    server: NatsServer, guest: DirectClient
) -> None:
    received: list[bytes] = []
    await guest.subscribe_direct("s", lambda message: received.append(message.data[:6]))
    transport = transport_of(guest)
    server.pause()
    try:
        num_sent = await fill(guest, "s")
        await asyncio.sleep(0.01)
        guest.send("s", b"%06d" % num_sent)  # behind what the library waits to write
        unsent = transport.get_write_buffer_size()
        flushing = asyncio.create_task(guest.flush())
        await asyncio.sleep(0.05)
        assert transport.get_write_buffer_size() == unsent, "the ping went past a message"
    finally:
        server.resume()
    await flushing
    assert received == [b"%06d" % number for number in range(num_sent + 1)]


async def test_what_is_sent_when_the_connection_has_just_ended_arrives_over_the_next_one(guest: DirectClient) -> None:
    received = await received_by(guest)
    await guest.flush()
    transport = transport_of(guest)
    transport.abort()
    for number in range(3):  # before the library knows of it, while it learns of it, and later
        guest.send("s", b"%d" % number)
        await asyncio.sleep(0)
    await until(lambda: received == [b"0", b"1", b"2"])


async def test_unsubscribed_subject_is_not_handled_any_more(client: DirectClient) -> None:
    received: list[Msg] = []
    subscription = await client.subscribe_direct("s", received.append)
    await subscription.drain()  # type: ignore[no-untyped-call]
    client.send("s", b"x")
    await client.flush()
    assert not received
    assert not client._handlers


async def test_answer_that_comes_after_a_flush_was_given_up_harms_nothing(
    server: NatsServer, guest: DirectClient
) -> None:
    received: list[Msg] = []
    await guest.subscribe_direct("s", received.append)
    await guest.flush()
    server.pause()
    num_reads = guest.num_reads
    with pytest.raises(FlushTimeoutError):
        await guest.flush(0.1)
    await guest.ping()
    assert guest.num_reads == num_reads
    server.resume()
    await until(lambda: guest.num_reads > num_reads)
    guest.send("s")
    await guest.flush(5.0)
    assert len(received) == 1
    assert guest.is_connected


@pytest.mark.parametrize(("owed_s", "is_kept"), [(1.0, True), (60.0, False)])
async def test_connection_that_brings_something_is_kept_while_answers_are_late(
    guest: DirectClient, monkeypatch: pytest.MonkeyPatch, owed_s: float, is_kept: bool
) -> None:
    received: list[Msg] = []
    await guest.subscribe_direct("s", received.append)
    await guest.flush()
    # As the library counts them: two pings, to which there has been no answer.
    guest._pongs.append(asyncio.get_running_loop().create_future())
    guest._pings_outstanding = 2
    guest._pinged_at = time.monotonic() - owed_s
    guest.send("s")
    await until(lambda: bool(received))
    assert (guest._pings_outstanding == 0) is is_kept


async def test_flush_says_at_once_that_the_server_is_away(server: NatsServer, guest: DirectClient) -> None:
    server.kill()
    await until(lambda: not guest.is_connected)
    with pytest.raises(ConnectionReconnectingError):
        await guest.flush()
    server.restart()
    await until(lambda: guest.is_connected)


async def test_answers_are_waited_for_as_long_as_the_connection_lives(server: NatsServer, guest: DirectClient) -> None:
    async def answer(message: Msg) -> None:
        if message.data == b"answered":
            await message.respond(b"answer")

    async def ask(question: bytes) -> bytes:
        return (await guest.unless_lost(guest.request("s", question, timeout=60))).data

    await guest.subscribe("s", cb=answer)
    assert await ask(b"answered") == b"answer"
    asking = asyncio.create_task(ask(b"not answered"))
    await until(lambda: bool(guest.lost_callbacks))
    server.kill()
    with pytest.raises(ConnectionReconnectingError):
        async with asyncio.timeout(10):
            await asking
    server.restart()
    # What is asked while the server is away is answered by the one after it.
    assert await ask(b"answered") == b"answer"
    assert not guest.lost_callbacks


async def test_what_is_sent_while_the_server_is_away_arrives_later_up_to_a_bound(
    server: NatsServer, guest: DirectClient
) -> None:
    received = await received_by(guest)
    server.kill()
    await until(lambda: not guest.is_connected)
    assert not guest.is_writable
    await guest.wait_writable()  # does not wait while the server is away
    guest.send("s", b"kept")
    while guest._pending_data_size < 7 << 20:
        guest.send("other", bytes(1 << 19))
    with pytest.raises(OutboundBufferLimitError):
        guest.send("other", bytes(1 << 20))
    server.restart()
    await until(lambda: received == [b"kept"])
    guest.send("s", b"direct again")
    await until(lambda: received == [b"kept", b"direct again"])
    await guest.close()
    with pytest.raises(ConnectionClosedError):
        guest.send("s", b"x")


async def test_server_that_does_not_read_stops_direct_writes_until_it_does(
    server: NatsServer, guest: DirectClient
) -> None:
    received = await received_by(guest)
    transport = transport_of(guest)
    server.pause()
    try:
        num_sent = await fill(guest, "s")
        assert transport.get_write_buffer_size() < MAX_UNSENT_BYTES + (64 << 10)
        waiting = asyncio.create_task(guest.wait_writable())
        await asyncio.sleep(0.05)
        assert not waiting.done()
    finally:
        server.resume()
    await asyncio.wait_for(waiting, 10)
    await until(lambda: len(received) == num_sent)
    assert [int(payload[:6]) for payload in received] == list(range(num_sent))
