"""A worker whose engine has lost everything is to others as one that has died and was started again."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import MagicMock

import msgspec
import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer.consumer import SILENCE_S
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.subjects import drain_subject, probe_subject, worker_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, wait_until

ENDLESS = Sampling(max_tokens=1500, ignore_eos=True)


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
