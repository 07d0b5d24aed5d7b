"""A cordoned worker finishes what it has, takes nothing, and is there at once when it is uncordoned."""

from __future__ import annotations

import asyncio

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from shared.sampling import Sampling
from shared.subjects import drain_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway


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


async def test_order_that_is_unknown_drains_nothing(worker: RunningWorker, gateway: TestGateway) -> None:
    with pytest.raises(NatsTimeoutError):
        await gateway.nats.request(drain_subject(worker.name), b"something newer", timeout=0.2)
    drain_asked = worker.worker.consumer._orders._orders[b""].__self__  # type: ignore[attr-defined]
    assert not drain_asked.is_set()
    assert (await gateway.ask()).finish is not None
