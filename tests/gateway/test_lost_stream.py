"""NATS loses the interactive stream, and numbers of the old one must do no harm in the new one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from shared.nats_connection import connect
from shared.streams import INTERACTIVE_STREAM, RESULTS_STREAM, StreamLimits, ensure_streams
from tests.gateway.dispatch_bench import Bench, ListSink
from tests.gateway.wire_worker import until
from tests.ops.nats.secured import PASSWORDS, secured_server
from tests.servers import NatsServer


async def test_request_taken_back_after_its_stream_was_lost_deletes_no_other_message(own_bench: Bench) -> None:
    js = own_bench.nats.jetstream()
    await own_bench.submit(ListSink())
    await until(lambda: own_bench.flight.stream_seq is not None)
    await js.delete_stream(INTERACTIVE_STREAM)
    await ensure_streams(js, StreamLimits())
    await js.publish(f"hr.req.{own_bench.model}.interactive", b"another gateway's request")
    # This gateway was not told that the stream is a new one: it may be in the middle of finding out.
    own_bench.dispatcher.cancel([own_bench.flight])
    await own_bench.dispatcher._revoker.close()
    assert (await js.stream_info(INTERACTIVE_STREAM)).state.messages == 1


async def test_number_in_a_lost_stream_is_forgotten(own_bench: Bench) -> None:
    js = own_bench.nats.jetstream()
    worker = await own_bench.worker("a")
    await own_bench.submit(ListSink())
    await worker.claim(await worker.next_request())
    await until(lambda: own_bench.flight.worker is not None and own_bench.flight.stream_seq is not None)
    await own_bench.dispatcher.reconnected()
    assert own_bench.flight.stream_seq is not None
    await js.delete_stream(INTERACTIVE_STREAM)
    await own_bench.dispatcher.reconnected()
    assert own_bench.flight.stream_seq is None


async def test_server_that_lost_its_disk_queues_requests_of_people_again(tmp_path: Path) -> None:
    with secured_server(tmp_path, is_closed=False) as server:
        async with AsyncExitStack() as stack:
            admin = await connect(_url(server, "admin"), role="admin", name="admin")
            stack.push_async_callback(admin.close)
            js = admin.jetstream()
            await ensure_streams(js, StreamLimits())
            bench = Bench(_url(server, "gateway"), stack)
            await bench.start()
            await bench.submit(ListSink())
            await until(lambda: bench.flight.stream_seq is not None)
            lost = bench.flight.stream_seq
            # A gateway may make the one, and not the other.
            await js.delete_stream(INTERACTIVE_STREAM)
            await js.delete_stream(RESULTS_STREAM)
            restoring = asyncio.create_task(bench.dispatcher.reconnected())
            await until(lambda: bench.flight.stream_seq not in (None, lost))
            assert (await js.stream_info(INTERACTIVE_STREAM)).state.messages == 1
            restoring.cancel()
            await asyncio.gather(restoring, return_exceptions=True)


def _url(server: NatsServer, role: str) -> str:
    return f"nats://{role}:{PASSWORDS[role]}@127.0.0.1:{server.port}"
