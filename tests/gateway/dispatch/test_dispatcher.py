"""The dispatcher against a real NATS server, with a worker that speaks the wire as the test tells it to."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from gateway.dispatch.dispatcher import DispatchCounts, Dispatcher
from gateway.dispatch.inflight import EPOCHS_OF_ONE, Flight
from gateway.dispatch.sweep import SWEEP_INTERVAL_S
from gateway.dispatch.timeouts import RecoveryLimits
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.metrics import GatewayMetrics
from gpu_worker.consumer.gateway_watch import Cancellations
from shared.disaggregation import KvReady
from shared.messages import Delta, Finish, Request, Usage
from shared.nats_connection import connect
from shared.receipt import Timing
from shared.sampling import Sampling
from shared.streams import StreamLimits
from tests.gateway.dispatch_bench import FAST_FLEET, FAST_RECOVERY, PATIENT_RECOVERY, Bench, ListSink
from tests.gateway.wire_worker import HEARTBEAT_S, expected_text, until
from tests.servers import NatsServer


async def test_tokens_arrive_in_order_and_end_once(bench: Bench) -> None:
    worker, sink, request = await bench.begun(8)
    await worker.end(request, 8)
    await sink.end()
    assert sink.text == expected_text(8)
    assert sink.deltas[-1].finish == Finish("length", Usage(3, 8, 1))
    assert bench.endings == ["completed"]
    assert len(bench.dispatcher.flights) == 0


async def test_end_that_was_lost_with_the_workers_own_connection_is_not_waited_for_long(bench: Bench) -> None:
    bench.dispatcher._recovery._limits = replace(PATIENT_RECOVERY, reconnect_timeout_s=0.1)
    worker, sink, first = await bench.begun(3)
    # Its heartbeats show that it has nothing any more, and this gateway has not seen a connection end.
    worker.num_reconnects = 1
    second = await worker.next_request()
    assert (second.id, second.epoch, second.emitted) == (first.id, 1, (0, 1, 2))
    await worker.complete(second, 3, 6)
    await sink.end()
    assert (sink.text, bench.moves) == (expected_text(6), ["nats_restart"])


async def test_gap_dispatches_the_request_again_from_what_was_emitted(bench: Bench) -> None:
    worker, sink, first = await bench.begun(3)
    await worker.say(first, 5, 6)
    second = await worker.next_request()
    assert (second.id, second.epoch, second.emitted) == (first.id, 1, (0, 1, 2))
    await worker.say(first, 3, 6)
    await worker.complete(second, 3, 6)
    await sink.end()
    assert sink.text == expected_text(6)
    assert bench.moves == ["gap"]
    assert any(first.id in cancel.ids and cancel.epoch == 0 for cancel in worker.cancels)


async def test_silent_worker_loses_its_request_to_another(bench: Bench) -> None:
    first, sink, _request = await bench.begun(5)
    await sink.has(5)
    await first.die()
    second = await bench.worker("b")
    moved = await second.next_request()
    assert (moved.epoch, moved.emitted) == (1, (0, 1, 2, 3, 4))
    await second.complete(moved, 5, 9)
    await sink.end()
    assert sink.text == expected_text(9)
    assert bench.moves == ["worker_dead"]


async def test_stalled_worker_loses_its_request_although_it_beats(hasty_bench: Bench) -> None:
    first, sink = await hasty_bench.worker("a"), ListSink()
    await hasty_bench.submit(sink)
    request = await first.next_request()
    first.running = 1
    first.is_pulling = False
    await first.claim(request)
    await first.say(request, 0, 2)
    await sink.has(2)
    second = await hasty_bench.worker("b")
    moved = await second.next_request()
    assert (moved.epoch, moved.emitted) == (1, (0, 1))
    assert hasty_bench.moves == ["worker_dead"]


async def test_pause_of_the_gateway_does_not_count_as_silence_of_a_worker(hasty_bench: Bench) -> None:
    worker, sink = await hasty_bench.worker("a"), ListSink()
    worker.running = 1
    await hasty_bench.submit(sink)
    request = await worker.begin(2)
    await sink.has(2)
    await asyncio.sleep(3 * HEARTBEAT_S)
    time.sleep(1.5)  # noqa: ASYNC251 - longer than a step or an answer may take, by the limits of the bench
    await asyncio.sleep(5 * SWEEP_INTERVAL_S)
    await worker.say(request, 2, 4)
    await worker.end(request, 4)
    await sink.end()
    assert sink.text == expected_text(4)
    assert hasty_bench.moves == []


async def test_request_with_no_news_is_dispatched_again(hasty_bench: Bench) -> None:
    worker, sink = await hasty_bench.worker("a"), ListSink()
    await hasty_bench.submit(sink)
    await worker.begin(2)
    moved = await worker.next_request()
    assert (moved.epoch, moved.emitted) == (1, (0, 1))
    assert hasty_bench.moves == ["silent"]


async def test_request_that_no_worker_keeps_fails_explicitly(bench: Bench) -> None:
    worker, sink = await bench.worker("a"), ListSink()
    await bench.submit(sink)
    for _ in range(FAST_RECOVERY.max_moves + 1):
        request = await worker.begin()
        assert request.reply is not None
        await worker.send(request.reply, [Delta(request.id, request.epoch, 7, (7,), "?")])
    await sink.end()
    assert sink.refusal == (500, "request_quarantined")
    assert request.id in sink.error.message
    assert bench.endings == ["failed"]


async def test_moved_stream_reaches_a_worker_of_a_version_without_the_queue_of_what_goes_first(bench: Bench) -> None:
    first, sink, request = await bench.begun(2)
    older = await bench.worker("b", ("interactive",))
    await first.stop_pulling()
    await first.end(request, 2, Finish("handoff"))
    # Among workers of both versions it goes where all of them look.
    attempt = await older.next_request()
    assert (attempt.epoch, attempt.emitted) == (1, (*request.emitted, 0, 1))
    await older.complete(attempt, 2, 4)
    await sink.end()
    assert (sink.error, sink.text) == (None, expected_text(4))


async def test_moved_stream_leaves_a_queue_that_no_worker_pulls_any_more(bench: Bench) -> None:
    first, _sink, request = await bench.begun(2)
    await first.stop_pulling()
    await first.end(request, 2, Finish("handoff"))
    await until(lambda: bench.flight.queue == "resumed" and bench.flight.stream_seq)
    older = await bench.worker("b", ("interactive",))
    first.is_beating = False
    await first.nats.close()
    attempt = await older.next_request()
    assert attempt.emitted == (*request.emitted, 0, 1)
    assert bench.moves == ["handoff", "waiting"]


@pytest.mark.parametrize(("epoch", "expected"), [(None, "handoff"), (0, "prefilled"), (7, "handoff")])
async def test_handoff_moves_the_request_at_once_without_the_place_of_its_kv_where_no_worker_fetches_it(
    bench: Bench, epoch: int | None, expected: str
) -> None:
    worker, sink, request = await bench.begun(2)
    ready = None if epoch is None else KvReady(request.id, epoch, "w1", "0" * 32)
    await worker.end(request, 2, Finish("handoff", ready=ready))
    # No worker takes from the queue of those who decode: earlier ones would refuse the field.
    moved = await worker.next_request()
    assert (moved.emitted, moved.ready) == ((0, 1), None)
    assert bench.moves == [expected]
    await worker.claim(moved)
    await worker.end(moved, 2)
    await sink.end()
    assert sink.text == expected_text(2)


async def test_handovers_without_a_token_are_limited_as_any_others_are(bench: Bench) -> None:
    worker, sink = await bench.worker("a"), ListSink()
    await bench.submit(sink)
    for epoch in range(FAST_RECOVERY.max_moves + 1):
        request = await worker.next_request()
        assert request.epoch == epoch
        await worker.claim(request)
        await worker.end(request, 0, Finish("handoff", ready=KvReady(request.id, request.epoch, "w1")))
    await sink.end()
    assert sink.error is not None
    assert (sink.error.status, sink.error.code) == (500, "request_quarantined")


async def test_cancelled_request_is_taken_from_its_worker(bench: Bench) -> None:
    worker, sink = await bench.worker("a"), ListSink()
    request = await bench.submit(sink)
    await worker.claim(await worker.next_request())
    await until(lambda: bench.flight.worker is not None)
    bench.dispatcher.cancel([bench.flight])
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    assert bench.endings == ["cancelled"]
    assert sink.endings == 0
    remembered = Cancellations()
    for cancel in worker.cancels:
        remembered.add(request.id, cancel.epoch, 0.0)
    # A gateway that was paused may end what another one has taken over meanwhile.
    is_stopped = [remembered.covers(request.id, epoch, 0.0) for epoch in (0, EPOCHS_OF_ONE - 1, EPOCHS_OF_ONE)]
    assert is_stopped == [True, True, False]


async def test_request_that_is_left_to_another_gateway_is_stopped_here_and_not_ended(bench: Bench) -> None:
    worker, sink = await bench.worker("a"), ListSink()
    request = await bench.submit(sink)
    await worker.claim(await worker.next_request())
    await until(lambda: bench.flight.worker is not None)
    bench.dispatcher.let_go([bench.flight])
    await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))
    assert (bench.endings, sink.endings) == ([], 0)


async def test_deadline_ends_a_waiting_request_with_a_timeout(bench: Bench) -> None:
    sink = ListSink()
    await bench.submit(sink, deadline=time.time() + 0.1)
    await sink.end()
    assert sink.refusal == (408, "timeout")


async def test_wall_clock_that_jumps_before_a_request_is_published_does_not_end_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    worker, sink = await bench.worker("a"), ListSink()
    request = Request(id="a", model=bench.model, text="x", reply=bench.dispatcher.reply, deadline=time.time() - 3600)
    expires_at = asyncio.get_running_loop().time() + 60
    flight = bench.dispatcher.submit(request, sink, 1, expires_at)
    assert flight.expires_at == expires_at
    taken = await worker.next_request()
    await worker.end(taken, 0, Finish("expired"))
    again = await worker.next_request()
    assert again.deadline == pytest.approx(time.time() + 60, abs=5)
    assert re.search(r"by the clock of a-\S+ its deadline has passed", caplog.text)
    await worker.end(again, 0)
    await sink.end()
    assert sink.error is None


async def test_wall_clock_that_jumps_ends_no_request_and_changes_no_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, sink = await bench.worker("a"), ListSink()
    await bench.submit(sink, deadline=time.time() + 60)
    request = await first.begin()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    await first.say(request, 0, 2)
    # The next one takes the request after the jump: by its clock the deadline is past, and it says so. The clock of
    # NATS, which deadlines follow, has not jumped.
    await first.end(request, 2, Finish("expired"))
    attempt = await first.next_request()
    assert attempt.epoch == 1
    assert attempt.deadline == pytest.approx(now() + 60, abs=5)
    await first.say(attempt, 2, 4)
    await first.end(attempt, 4)
    await sink.end()
    assert sink.error is None
    assert sink.text == expected_text(4)


async def test_full_queue_refuses_with_retry_after(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    async with AsyncExitStack() as stack:
        bench = Bench(server.url, stack)
        bench.nats = await connect(server.url, role="gateway", name="gateway")
        stack.push_async_callback(bench.nats.close)
        limits = StreamLimits(interactive_max_msgs=2)
        bench.dispatcher = Dispatcher(bench.nats, "gw", FAST_FLEET, FAST_RECOVERY, limits)
        bench.dispatcher.clock._offset_s += 3600
        await bench.dispatcher.start()
        stack.push_async_callback(bench.dispatcher.close)
        assert bench.dispatcher.clock.now() == pytest.approx(time.time(), abs=5)
        sinks = [ListSink() for _ in range(3)]
        for sink in sinks:
            await bench.submit(sink)
        flights = list(bench.dispatcher.flights)
        await sinks[2].end()
        error = sinks[2].error
        assert error is not None
        assert (error.status, error.code) == (503, "queue_full")
        assert error.retry_after_s
        await asyncio.sleep(0.1)
        # A queue that is full is there: no other request is published again.
        assert [(flight.epoch, flight.sink.error) for flight in flights[:2]] == [(0, None)] * 2


async def test_restarted_nats_serves_old_and_new_requests(own_bench: Bench, nats: NatsServer) -> None:
    worker = await own_bench.worker("a")
    worker.is_pulling = True
    claimed, unclaimed, later = ListSink(), ListSink(), ListSink()
    await own_bench.submit(claimed)
    held = await worker.begin(2)
    await claimed.has(2)
    await worker.stop_pulling()
    await own_bench.submit(unclaimed)
    await until(lambda: own_bench.flight.stream_seq is not None)
    nats.restart()
    await until(lambda: worker.num_prepared == 2)
    worker.is_pulling = True
    await worker.say(held, 2, 4)
    await worker.end(held, 4)
    await claimed.end()
    assert claimed.text == expected_text(4)
    request = await worker.next_request()
    assert request.id == own_bench.flight.id
    assert request.epoch >= 1
    await worker.claim(request)
    await worker.end(request, 0)
    await unclaimed.end()
    assert unclaimed.error is None
    await own_bench.submit(later)
    request = await worker.begin()
    await worker.end(request, 0)
    await later.end()
    assert later.error is None


async def test_long_absence_of_nats_ends_requests_explicitly(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    nats = await connect(server.url, role="gateway", name="gateway")
    dispatcher = Dispatcher(nats, "gw", recovery_limits=RecoveryLimits(outage_timeout_s=0.2))
    await dispatcher.start()
    sink = ListSink()
    request = Request(id="a", model="m", text="x", reply=dispatcher.reply, deadline=time.time() + 30)
    dispatcher.submit(request, sink, 1)
    server.kill()
    dispatcher.disconnected()
    await sink.end()
    assert sink.refusal == (503, "queue_unavailable")
    await until(lambda: not nats.is_connected)
    await asyncio.sleep(0.6)
    with pytest.raises(ApiError):
        dispatcher.submit(request, ListSink(), 1)
    server.start()
    await until(lambda: nats.is_connected)
    await dispatcher.close()
    await nats.close()


async def test_request_that_comes_while_the_connection_is_renewed_waits_for_it(
    own_bench: Bench, nats: NatsServer
) -> None:
    worker = await own_bench.worker("a")
    serving = asyncio.create_task(worker.serve(0.001))
    nats.kill()
    await until(lambda: not own_bench.nats.is_connected)
    sink = ListSink()
    await own_bench.submit(sink, sampling=Sampling(max_tokens=5))
    nats.start()
    await sink.end()
    assert sink.error is None
    assert sink.text == expected_text(5)
    serving.cancel()


async def test_request_that_comes_when_nats_is_away_is_refused_soon_and_the_next_at_once(
    own_bench: Bench, nats: NatsServer
) -> None:
    nats.kill()
    await until(lambda: not own_bench.nats.is_connected)
    sink = ListSink()
    await own_bench.submit(sink)
    await sink.end(5.0)
    assert sink.refusal == (503, "queue_unavailable")
    assert sink.error.retry_after_s
    with pytest.raises(ApiError):
        await own_bench.submit(ListSink())
    nats.start()
    await until(lambda: own_bench.nats.is_connected)


async def test_new_requests_are_refused_while_nats_is_silent_and_streams_stay_where_they_are(
    own_bench: Bench, nats: NatsServer
) -> None:
    worker, stream, sink = await own_bench.worker("a"), ListSink(), ListSink()
    outage_timeout_s = own_bench.limits.outage_timeout_s
    await own_bench.submit(stream)
    request = await worker.begin(4)
    await stream.has(4)
    nats.pause()
    # It is published before anybody can know: NATS never says that it has it.
    refused = await own_bench.submit(sink)
    await sink.end(outage_timeout_s / 2)
    for error in (sink.error, await refusal(own_bench)):
        assert error is not None
        assert (error.status, error.code) == (503, "queue_unavailable")
        assert error.retry_after_s
    await asyncio.sleep(0.5)
    nats.resume()
    await until(lambda: own_bench.dispatcher.nats_watch.is_connected)
    await worker.end(request, 4)
    await stream.end()
    assert (stream.error, stream.text, own_bench.moves) == (None, expected_text(4), [])
    assert own_bench.dispatcher.fleet.is_ready(own_bench.model)
    # No worker works on what was refused.
    await until(lambda: any(refused.id in cancel.ids for cancel in worker.cancels))


async def test_request_after_a_silence_of_nats_is_refused_at_once_when_the_connection_is_given_up(
    own_bench: Bench, nats: NatsServer
) -> None:
    nats.pause()
    await until(lambda: own_bench.dispatcher.nats_watch.is_suspected)
    nats.kill()
    await until(lambda: not own_bench.nats.is_connected and not own_bench.dispatcher.nats_watch.is_suspected)
    assert (await refusal(own_bench)).code == "queue_unavailable"
    nats.start()
    await until(lambda: own_bench.nats.is_connected)


async def refusal(bench: Bench) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await bench.submit(ListSink())
    return raised.value


async def test_failing_sweep_of_the_fleet_does_not_stop_that_of_the_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: float) -> None:
        raise RuntimeError("bad state of a peer")

    sweeps: list[float] = []
    monkeypatch.setattr(bench.dispatcher.fleet, "sweep", fail)
    monkeypatch.setattr(bench.dispatcher._recovery, "sweep", lambda now, is_nats_late: sweeps.append(now))
    await until(lambda: len(sweeps) >= 3)
    assert sum("bad state of a peer" in record.getMessage() for record in caplog.records) == 1


async def test_tenant_has_a_share_of_its_models_workers_while_others_let_requests_wait(bench: Bench) -> None:
    worker = await bench.worker("a")
    await worker.stop_pulling()

    def share(tenant: str) -> FleetLoad | None:
        load = bench.dispatcher.fleet.load(bench.model)
        assert load is not None
        return bench.dispatcher.flights.share(load, tenant)

    assert share("polite") is None
    await bench.submit(ListSink(), tenant="greedy")
    await until(lambda: share("polite") is not None)
    # There is no one to share it with.
    assert share("greedy") is None


async def test_ends_are_counted_by_model() -> None:
    metrics = GatewayMetrics()
    counts = DispatchCounts(metrics)
    now = asyncio.get_running_loop().time()
    flight = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, now, submitted_at=now - 10)
    counts.ended(flight, "completed", Finish("length", Usage(5, 3), timing=Timing(1.0, 2.0)))
    counts.ended(flight, "completed", Finish("stop", Usage(5, 3)))
    counts.ended(flight, "cancelled", None)
    counts.ended(flight, "failed", None)
    model = metrics.by_model.models["m"]
    assert model.finished == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert metrics.sequences == {"completed": 2, "failed": 1, "cancelled": 1}
    assert (model.prefill_s.total, model.decode_s.total) == (1.0, 2.0)
    assert (model.prompt_lengths.total, model.output_lengths.total) == (10, 6)
    assert model.mean_gap_s.total == 1.0
    # Ten seconds in all; three of them were computed.
    assert 6.9 < model.queue_s.total < 8
