"""The connection, the servers and the gateways fail; the worker goes on.

A worker whose engine has lost everything is to others as one that has died and was started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer.consumer import SILENCE_S
from shared.messages import Delta, GatewayHeartbeat, Heartbeat, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import ALL_WORKERS, drain_subject, gateway_subject, probe_subject, request_subject, worker_subject
from tests.gpu_worker.consumer.harness import Answer, MakeWorker, RunningWorker, TestGateway, wait_until
from tests.servers import NatsServer

ENDLESS = Sampling(max_tokens=1500, ignore_eos=True)


@pytest.fixture
def small_payload_server(start_nats: Callable[..., NatsServer], tmp_path: Path) -> NatsServer:
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 2048\n")
    return start_nats("-c", str(config))


@pytest.fixture
async def small_payload_gateway(small_payload_server: NatsServer, model: str) -> AsyncIterator[TestGateway]:
    nats = await connect(small_payload_server.url, role="gateway", name="test")
    gateway = TestGateway(nats, model)
    await gateway.start()
    yield gateway
    await nats.close()


async def test_restarted_nats_is_pulled_from_again(
    start_nats: Callable[..., NatsServer], make_worker: MakeWorker, model: str
) -> None:
    server = start_nats()
    worker = await make_worker(server.url)
    nats = await connect(server.url, role="gateway", name="test")
    gateway = TestGateway(nats, model)
    await gateway.start()
    await gateway.ask()
    server.restart()
    await wait_until(lambda: nats.stats["reconnects"] == worker.nats.stats["reconnects"] == 1)
    await ensure_streams(gateway.js, StreamLimits())
    assert (await gateway.ask()).finish.reason == "length"
    await nats.close()


async def test_what_is_generated_while_nats_and_then_the_gateway_are_away_arrives(
    start_nats: Callable[..., NatsServer], make_worker: MakeWorker, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_nats()
    # Steps so long that few are made while the death of NATS is not known yet.
    worker = await make_worker(server.url, simulate=40.0)
    nats = await connect(server.url, role="gateway", name="test")
    gateway = TestGateway(nats, model)
    await gateway.start()
    answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=30, ignore_eos=True)))
    await answer.wait_for_tokens(5)
    # In this order: what is sent to a NATS where nobody listens any more would be lost however long that lasts.
    server.kill()
    await nats.close()
    num_before = len(answer.token_ids)
    server.start()
    await wait_until(lambda: worker.nats.stats["reconnects"] == 1)
    assert caplog.messages.count("connection to NATS lost") == 1
    await asyncio.sleep(0.2)
    nats = await connect(server.url, role="gateway", name="test")
    await nats.subscribe(gateway.reply, cb=gateway.receive)
    await answer.wait()
    # What was on its way when the connections ended is lost: then the gateway sees a gap.
    assert 30 - len(answer.token_ids) <= 5
    assert len(answer.token_ids) > num_before
    # And it is told that something may be lost.
    assert worker.worker.consumer._source.num_reconnects == 1
    await nats.close()


async def test_gateway_that_listens_again_after_nats_was_away_has_a_heartbeat_at_once(
    start_nats: Callable[..., NatsServer], make_worker: MakeWorker, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None comes because it is time for one.
    monkeypatch.setattr("gpu_worker.consumer.consumer.INTERVAL_S", 3600.0)
    server = start_nats()
    await make_worker(server.url, simulate=10.0)
    nats = await connect(server.url, role="gateway", name="test")
    gateway = TestGateway(nats, model)
    await gateway.start()
    answer = await gateway.publish(gateway.request(sampling=ENDLESS))
    await answer.wait_for_tokens(2)
    heard: list[int] = []

    async def receive(message: Msg) -> None:
        heard.append(msgspec.msgpack.decode(message.data, type=Heartbeat).num_reconnects)

    await nats.subscribe(ALL_WORKERS, cb=receive)
    await nats.flush()
    server.restart()
    await wait_until(lambda: bool(heard))
    assert heard[0] == 1
    await nats.close()


async def test_deleted_consumer_is_made_again(worker: RunningWorker, gateway: TestGateway) -> None:
    await gateway.js.delete_consumer("HR_INTERACTIVE", f"{gateway.model}-interactive")
    assert (await gateway.ask()).finish.reason == "length"


async def _beat(gateway: TestGateway) -> None:
    heartbeat = GatewayHeartbeat(gateway=gateway.name, unclaimed=0, unclaimed_tokens=0)
    await gateway.nats.publish(gateway_subject(gateway.name), encode(heartbeat))


@pytest.fixture
async def impatient(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> RunningWorker:
    """A worker that soon takes silence for a death: long before it has said an endless text."""
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.SILENCE_S", 0.5)
    monkeypatch.setattr("gpu_worker.consumer.consumer.GATEWAY_CHECK_INTERVAL_S", 0.3)
    monkeypatch.setattr("gpu_worker.consumer.interactive_lane.REDELIVER_LATER", b'-NAK {"delay": 300000000}')
    return await make_worker(simulate=5.0)


async def _ask_and_fall_silent(gateway: TestGateway, sampling: Sampling = ENDLESS) -> Answer:
    """Ask, send one heartbeat, and return what has come until the worker gave the request back."""
    answer = await gateway.publish(gateway.request(sampling=sampling))
    await _beat(gateway)
    await answer.wait()
    assert answer.finish.reason == "handoff"
    return answer


async def test_requests_of_a_silent_gateway_are_dropped(
    impatient: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A gateway that wakes up reads that nobody works on it, and the queue keeps the request.
    answer = await _ask_and_fall_silent(gateway)
    await impatient.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)
    assert await gateway.num_queued() == 1
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.GIVE_UP_S", 0.6)
    await gateway.wait_until_acknowledged()
    assert sum(delta.prompt_tokens is not None for delta in answer.deltas) == 1


async def test_request_that_was_dropped_runs_again_when_its_gateway_is_heard_again(
    impatient: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await _ask_and_fall_silent(gateway, Sampling(max_tokens=400, ignore_eos=True))
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.SILENCE_S", 60.0)
    await _beat(gateway)
    # All of the answer.
    await wait_until(lambda: answer.finish is not None and answer.finish.reason == "length", 30)


async def test_request_of_a_gateway_that_is_silent_waits_until_it_is_heard_again(
    impatient: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _ask_and_fall_silent(gateway)
    late = await gateway.publish(gateway.request())
    await asyncio.sleep(0.5)
    assert (late.deltas, await gateway.num_queued()) == ([], 2)
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.SILENCE_S", 60.0)
    await _beat(gateway)
    assert (await late.wait()).finish.reason == "length"


async def test_worker_that_stood_still_drops_nothing(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.SILENCE_S", 0.5)
    monkeypatch.setattr("gpu_worker.consumer.consumer.GATEWAY_CHECK_INTERVAL_S", 0.1)
    await make_worker(simulate=5.0)
    answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=300, ignore_eos=True)))
    await _beat(gateway)
    await answer.wait_for_tokens(3)
    time.sleep(0.8)  # noqa: ASYNC251 - the worker's loop stands still, and so does the gateway's

    async def beat_forever() -> None:
        while True:
            await _beat(gateway)
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat_forever())
    assert (await answer.wait()).finish.reason == "length"
    beating.cancel()


async def test_request_that_came_while_the_worker_stood_still_is_taken(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.consumer.consumer.GATEWAY_CHECK_INTERVAL_S", 60.0)
    await make_worker()
    await _beat(gateway)
    await gateway.ask()  # the worker has heard the gateway, and waits for the next message
    monkeypatch.setattr("gpu_worker.consumer.gateway_watch.SILENCE_S", 0.2)
    request = gateway.request(sampling=Sampling(max_tokens=5, ignore_eos=True))
    answer = gateway.answer(request.id, request.epoch)
    gateway.nats.send(request_subject(gateway.model, "interactive", "t"), encode(request))
    time.sleep(0.5)  # noqa: ASYNC251 - the worker's loop stands still, and so does the gateway's
    async with asyncio.timeout(5.0):  # half of the time after which it would be delivered once more
        assert (await answer.wait()).finish.reason == "length"


async def test_answer_too_large_for_any_frame_fails_naming_the_field(
    small_payload_server: NatsServer, small_payload_gateway: TestGateway, make_worker: MakeWorker
) -> None:
    worker = await make_worker(url=small_payload_server.url)
    sampling = Sampling(max_tokens=1000, ignore_eos=True, prompt_logprobs=5)
    answer = await small_payload_gateway.ask("x " * 200, sampling=sampling)
    assert (answer.finish.reason, answer.finish.error_param) == ("failed", "prompt_logprobs")
    assert answer.deltas[-1].seq == 0
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)


async def test_what_an_older_attempt_could_not_send_harms_no_newer_one(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    consumer = (await make_worker(simulate=50.0)).worker.consumer
    answer = await gateway.publish(gateway.request(epoch=1, sampling=ENDLESS))
    await answer.claimed.wait()
    (held,) = consumer._held
    older, own = (Delta(held.request.id, epoch, 0) for epoch in (0, 1))
    consumer._interactive.report_unsent([older])
    consumer._interactive.report_too_large(older)
    assert consumer._held.is_current(held)
    consumer._interactive.report_unsent([own])
    assert not consumer._held.is_current(held)


async def test_worker_that_withdraws_is_missed_at_once_and_takes_nothing_until_it_rejoins(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    running = await gateway.publish(gateway.request(sampling=ENDLESS))
    await running.wait_for_tokens(1)
    before = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1)
    consumer, began = worker.worker.consumer, time.monotonic()
    withdrawal = asyncio.create_task(consumer.withdraw("rank 1 is gone"))
    await wait_until(lambda: not len(consumer._held))
    # What it had sent before is there, and that it answers no probes.
    await worker.nats.flush()
    await gateway.nats.flush()
    with pytest.raises(NoRespondersError):
        await gateway.nats.request(probe_subject(worker.name), b"", timeout=1.0)
    num_before = len(running.deltas)
    worker.heartbeats.clear()
    waiting = await gateway.publish(gateway.request())
    await withdrawal
    assert time.monotonic() - began > 0.99 * SILENCE_S
    assert all(heartbeat.started > before.started for heartbeat in worker.heartbeats)
    # It is there again, as another process that takes nothing yet: whoever supervises it sees that it lives.
    drained = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.draining)
    assert drained.started > before.started
    assert drained.running == 0
    assert consumer.withdrawn == "rank 1 is gone"
    await asyncio.sleep(0.3)
    assert not waiting.deltas
    assert len(running.deltas) == num_before
    await consumer.rejoin()
    assert consumer.withdrawn is None
    assert (await waiting.wait()).finish.reason == "length"
    assert not (await worker.wait_for_heartbeat(lambda heartbeat: True)).draining
    assert not worker.worker.has_failed.is_set(), "it took its own heartbeats of before for a namesake's"


async def test_worker_that_withdraws_again_before_it_has_rejoined_stays_away(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    consumer = worker.worker.consumer
    first = asyncio.create_task(consumer.withdraw("rank 1 is gone"))
    await asyncio.sleep(0)
    rejoining = asyncio.create_task(consumer.rejoin())
    await asyncio.sleep(0)
    await consumer.withdraw("rank 2 is gone")
    await asyncio.gather(first, rejoining)
    assert consumer.withdrawn == "rank 2 is gone"
    waiting = await gateway.publish(gateway.request())
    await asyncio.sleep(0.3)
    assert not waiting.deltas
    await consumer.rejoin()
    await waiting.wait()


async def test_cordoned_worker_finishes_what_it_runs_and_takes_nothing_until_it_is_uncordoned(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    consumer = worker.worker.consumer
    running = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=300, ignore_eos=True)))
    await running.wait_for_tokens(1)
    before = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1)
    consumer.cordon()
    waiting = await gateway.publish(gateway.request())
    cordoned = await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.draining)
    assert cordoned.started == before.started, "gateways must not move what it runs"
    assert (await running.wait()).finish.reason == "length"
    await asyncio.sleep(0.3)
    assert not waiting.deltas
    consumer.uncordon()
    assert (await waiting.wait()).finish.reason == "length"
    await worker.wait_for_heartbeat(lambda heartbeat: not heartbeat.draining)


async def test_worker_whose_engine_comes_back_is_still_cordoned(worker: RunningWorker, gateway: TestGateway) -> None:
    consumer = worker.worker.consumer
    consumer.cordon()
    await consumer.withdraw("rank 1 is gone")
    consumer.uncordon()
    assert consumer._held.is_withdrawn, "its engine is still away"
    consumer.cordon()
    await consumer.rejoin()
    waiting = await gateway.publish(gateway.request())
    await asyncio.sleep(0.3)
    assert not waiting.deltas
    consumer.uncordon()
    await waiting.wait()


async def test_order_is_answered_once_gateways_could_hear_of_it(
    worker: RunningWorker, nats_url: str, model: str
) -> None:
    admin = await connect(nats_url, role="admin", name="test")
    heard: list[bool] = []

    async def hear(message: Msg) -> None:
        heard.append(msgspec.msgpack.decode(message.data, type=Heartbeat).draining)

    await admin.subscribe(worker_subject(model, worker.name), cb=hear)
    for content, is_cordoned in ((b"cordon", True), (b"uncordon", False)):
        assert (await admin.request(drain_subject(worker.name), content, timeout=10)).data == b""
        await admin.flush()
        assert heard[-1:] == [is_cordoned]
    await admin.close()


async def test_order_that_is_unknown_drains_nothing(worker: RunningWorker, gateway: TestGateway) -> None:
    with pytest.raises(NatsTimeoutError):
        await gateway.nats.request(drain_subject(worker.name), b"something newer", timeout=0.2)
    drain_asked = worker.worker.consumer._orders._orders[b""].__self__  # type: ignore[attr-defined]
    assert not drain_asked.is_set()
    assert (await gateway.ask()).finish is not None


async def test_worker_that_loses_a_rank_withdraws_until_its_group_is_whole_again(worker: RunningWorker) -> None:
    group = worker.worker._group = MagicMock()
    group.group.lost = None
    worker.worker._follow_group()
    assert worker.worker.withdrawn is None
    group.group.lost = "rank 1 is gone"
    await asyncio.to_thread(group.group.on_lost)
    await wait_until(lambda: worker.worker.withdrawn == "rank 1 is gone")
    # The engine may be waiting for that rank, so it has to check.
    await wait_until(lambda: group.check.called)
    await asyncio.to_thread(group.group.on_formed)
    await wait_until(lambda: worker.worker.withdrawn is None)
    worker.worker._follow_group()
    await wait_until(lambda: worker.worker.withdrawn == "rank 1 is gone")
