"""What a dispatcher does to its queue and streams on NATS, and what it says to workers and other gateways."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from gateway.dispatch.revoker import MAX_DELETIONS
from gateway.errors import ApiError
from shared.errors import DependencyError
from shared.messages import GatewayHeartbeat
from shared.streams import (
    DEAD_STREAM,
    INTERACTIVE_STREAM,
    PROGRESS_STREAM,
    RESULTS_STREAM,
    StreamLimits,
    ensure_interactive_stream,
)
from tests.gateway.dispatch_bench import FAST_RECOVERY, Bench, ListSink
from tests.gateway.wire_worker import until
from tests.servers import NatsServer


async def num_queued(bench: Bench) -> int:
    js = bench.nats.jetstream()
    info = await js.stream_info(INTERACTIVE_STREAM, subjects_filter=f"hr.req.{bench.model}.interactive")
    return sum((info.state.subjects or {}).values())


async def until_queue_is_empty(bench: Bench) -> None:
    async with asyncio.timeout(5):
        while await num_queued(bench):  # noqa: ASYNC110 - each turn asks NATS
            await asyncio.sleep(0.01)


def num_waits() -> int:
    """Return how many tasks wait for a stream to be there."""
    return sum(getattr(task.get_coro(), "__qualname__", "") == "wait_for" for task in asyncio.all_tasks())


async def test_cancelled_request_that_no_worker_claimed_leaves_the_queue(bench: Bench) -> None:
    sink = ListSink()
    await bench.submit(sink)
    await until(lambda: bench.flight.stream_seq is not None)
    assert await num_queued(bench) == 1
    bench.dispatcher.cancel([bench.flight])
    await until_queue_is_empty(bench)


async def test_request_cancelled_before_the_queue_has_acknowledged_it_leaves_the_queue(bench: Bench) -> None:
    await bench.submit(ListSink())
    assert bench.flight.stream_seq is None
    bench.dispatcher.cancel([bench.flight])
    await bench.nats.flush()
    assert await num_queued(bench) <= 1
    await until_queue_is_empty(bench)


async def test_gateway_that_closes_takes_its_requests_out_of_the_queue_first(bench: Bench) -> None:
    sinks = [ListSink() for _ in range(10 * MAX_DELETIONS)]
    for sink in sinks:
        await bench.submit(sink)
    await until(lambda: bench.flight.stream_seq is not None)
    assert await num_queued(bench) == len(sinks)
    await bench.dispatcher.close()
    assert await num_queued(bench) == 0
    errors = {(e.status, e.code, e.retry_after_s) for sink in sinks if (e := sink.error) is not None}
    assert errors == {(503, "shutting_down", 1.0)}
    assert {sink.endings for sink in sinks} == {1}


async def test_closed_dispatcher_waits_for_no_stream_any_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(*_: object) -> None:
        raise DependencyError("no JetStream")

    monkeypatch.setattr("gateway.dispatch.queue_streams.ensure_record_streams", missing)
    await bench.dispatcher.reconnected()
    await until(num_waits)
    await bench.dispatcher.close()
    assert num_waits() == 0


async def test_frames_are_taken_for_lost_as_soon_as_nats_is_back_though_its_queue_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(*_: object) -> None:
        raise DependencyError("no JetStream")

    await bench.submit(ListSink())
    monkeypatch.setattr("gateway.dispatch.queue_streams.ensure_interactive_stream", missing)
    restoring = asyncio.create_task(bench.dispatcher.reconnected())
    await until(lambda: bench.flight.reconnected_at > bench.flight.progressed_at)
    assert not restoring.done()
    restoring.cancel()


async def test_streams_of_results_and_dead_letters_are_made_at_the_start_and_when_nats_has_lost_them(
    own_bench: Bench,
) -> None:
    js = own_bench.nats.jetstream()
    for _ in range(2):
        await until(lambda: not num_waits())
        for stream in (RESULTS_STREAM, DEAD_STREAM, PROGRESS_STREAM):
            assert (await js.stream_info(stream)).config.name == stream
            await js.delete_stream(stream)
        await own_bench.dispatcher.reconnected()


async def test_gateway_tells_the_others_what_no_worker_has_claimed(bench: Bench) -> None:
    heard = await bench.nats.subscribe(bench.dispatcher.reply.replace("hr.tok.", "hr.gateway."))
    await bench.submit(ListSink())
    while True:
        heartbeat = msgspec.msgpack.decode((await heard.next_msg(timeout=5)).data, type=GatewayHeartbeat)
        if heartbeat.unclaimed:
            break
    assert (heartbeat.unclaimed, heartbeat.unclaimed_tokens) == (1, bench.flight.estimated_tokens)


async def test_worker_whose_heartbeats_stop_is_probed_and_its_answer_is_a_sign_of_life(bench: Bench) -> None:
    worker = await bench.worker("a")
    answers: list[str] = []
    liveness = bench.dispatcher.fleet.liveness
    note_answer = liveness.note_answer

    def spy(name: str, now: float) -> None:
        answers.append(name)
        note_answer(name, now)

    liveness.note_answer = spy  # type: ignore[method-assign]
    await worker.stop_beating()
    await until(lambda: len(answers) >= 2)
    assert set(answers) == {worker.name}


async def test_deleted_stream_is_made_again(own_bench: Bench, nats: NatsServer) -> None:
    await own_bench.nats.jetstream().delete_stream(INTERACTIVE_STREAM)
    refused, accepted = ListSink(), ListSink()
    await own_bench.submit(refused)
    await refused.end()
    assert refused.refusal == (503, "queue_unavailable")
    await until(lambda: own_bench.dispatcher._streams._restoring is None)
    await own_bench.submit(accepted)
    await until(lambda: own_bench.flight.stream_seq is not None)


async def test_streams_of_records_are_made_without_the_queue(own_bench: Bench) -> None:
    await until(lambda: not num_waits())
    js = own_bench.nats.jetstream()
    await js.delete_stream(INTERACTIVE_STREAM)
    await js.delete_stream(RESULTS_STREAM)
    # Made here, what the old one held would never be published again.
    own_bench.dispatcher._streams.restore_records()
    await until(lambda: not num_waits())
    assert (await js.stream_info(RESULTS_STREAM)).config.name == RESULTS_STREAM
    with pytest.raises(NotFoundError):
        await js.stream_info(INTERACTIVE_STREAM)


async def test_request_that_the_queue_never_had_is_refused_though_the_first_answer_was_lost(own_bench: Bench) -> None:
    await own_bench.nats.jetstream().delete_stream(INTERACTIVE_STREAM)
    refused = ListSink()
    await own_bench.submit(refused)
    own_bench.dispatcher._publisher._waiting.clear()
    await refused.end()
    assert refused.refusal == (503, "queue_unavailable")
    assert own_bench.flight.epoch == 1


async def test_close_ends_the_making_of_the_stream(own_bench: Bench) -> None:
    never = asyncio.Event()
    own_bench.dispatcher._streams._ensure_interactive = never.wait  # type: ignore[assignment, method-assign]
    own_bench.dispatcher._streams.restore_soon()
    assert own_bench.dispatcher._streams._restoring is not None
    await asyncio.sleep(0)
    await own_bench.dispatcher.close()
    await asyncio.sleep(0)
    assert own_bench.dispatcher._streams._restoring is None


@pytest.fixture
async def clustered(start_nats: Callable[..., NatsServer], request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A server that says, as one of a cluster does, that there are others; requests wait `request.param` seconds."""
    async with AsyncExitStack() as stack:
        bench = Bench(start_nats().url, stack)
        bench.limits = dataclasses.replace(FAST_RECOVERY, refused_retry_s=0.2, outage_timeout_s=request.param)
        await bench.start()
        # No other part makes a stream behind the test's back.
        await until(lambda: not num_waits())
        bench.nats._server_info = bench.nats._server_info | {"cluster": "c"}
        yield bench


# It is not its patience that ends the wait, however slow the machine is.
@pytest.mark.parametrize("clustered", [60.0], indirect=True, ids=["patient"])
async def test_new_request_waits_while_the_servers_of_a_cluster_elect_a_leader(
    clustered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_be_made = asyncio.Event()

    async def wait_for_leader(js: JetStreamContext, limits: StreamLimits) -> None:
        if not may_be_made.is_set():
            raise DependencyError("no leader")
        await ensure_interactive_stream(js, limits)

    monkeypatch.setattr("gateway.dispatch.queue_streams.ensure_interactive_stream", wait_for_leader)
    monkeypatch.setattr("gateway.dispatch.queue_streams.STREAM_RETRY_S", 0.01)
    await clustered.nats.jetstream().delete_stream(INTERACTIVE_STREAM)
    sink = ListSink()
    await clustered.submit(sink)
    # It is published again and again, and refused each time.
    await until(lambda: clustered.flight.epoch >= 2)
    assert (sink.endings, clustered.flight.num_unclaimed) == (0, 0)
    may_be_made.set()
    await until(lambda: clustered.flight.stream_seq is not None)
    assert (sink.endings, clustered.flight.refused_at) == (0, None)


@pytest.mark.parametrize("clustered", [1.0], indirect=True, ids=["impatient"])
async def test_new_request_fails_when_no_leader_is_elected_for_long(
    clustered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_leader(*arguments: object) -> None:
        raise DependencyError("no leader")

    monkeypatch.setattr("gateway.dispatch.queue_streams.ensure_interactive_stream", no_leader)
    await clustered.nats.jetstream().delete_stream(INTERACTIVE_STREAM)
    sink = ListSink()
    await clustered.submit(sink)
    began = asyncio.get_running_loop().time()
    await sink.end()
    assert sink.error is not None
    assert (sink.error.status, sink.error.code, sink.error.retry_after_s) == (503, "queue_unavailable", 2.0)
    assert asyncio.get_running_loop().time() - began >= clustered.limits.outage_timeout_s


async def test_streams_that_cannot_be_made_yet_are_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tries = 0

    async def ensure(*arguments: object) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise DependencyError("no JetStream")

    monkeypatch.setattr("gateway.dispatch.queue_streams.ensure_interactive_stream", ensure)
    monkeypatch.setattr("gateway.dispatch.queue_streams.STREAM_RETRY_S", 0.001)
    bench.dispatcher.disconnected()
    await bench.dispatcher.reconnected()
    assert num_tries == 3
    # It counts as back, however long that took.
    assert bench.dispatcher._recovery.holds_back(math.inf)


async def test_request_that_has_ended_ends_no_second_time(bench: Bench) -> None:
    sink = ListSink()
    await bench.submit(sink)
    flight, endings = bench.flight, bench.endings
    for _ in range(2):
        bench.dispatcher.cancel([flight])
        bench.dispatcher.fail(flight, ApiError(500, "broken"))
    assert (endings, sink.endings) == (["cancelled"], 0)
