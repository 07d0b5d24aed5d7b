"""A worker pulls from the batch queues of all tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer.queued_message import QueuedMessage
from shared.batch_streams import batch_stream
from shared.messages import encode
from shared.sampling import Sampling
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, fresh_name, wait_until

MakeWorker = Callable[..., Awaitable[RunningWorker]]


async def _publish(gateway: TestGateway, tenant: str, num_jobs: int, max_tokens: int = 8) -> None:
    for _ in range(num_jobs):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        job = gateway.request(lane="batch", tenant=tenant, reply=None, sampling=sampling)
        await gateway.js.publish(request_subject(gateway.model, "batch", tenant), encode(job))


async def _hear_tenants(gateway: TestGateway, *tenants: str) -> list[str]:
    """Return a list to which the tenant of each result is added."""
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(json.loads(message.data)["tenant"])

    for tenant in tenants:
        await gateway.nats.subscribe(f"hr.stored.{tenant}.*", cb=note)
    return heard


async def test_queue_made_while_a_worker_runs_is_found(worker: RunningWorker, gateway: TestGateway) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    heard = await _hear_tenants(gateway, tenant)
    await _publish(gateway, tenant, 1)
    await wait_until(lambda: heard == [tenant], 15)


async def test_queue_that_is_deleted_is_left_alone_and_the_others_go_on(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    tenant = fresh_name("tenant")
    queues = worker.worker.consumer._batch_queue
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    await queues.search()
    assert tenant in queues._queues
    # A counter never goes back.
    num_redelivered = queues.num_redelivered
    queues._queues[tenant].num_redelivered += 2
    await gateway.js.delete_stream(batch_stream(tenant))
    await queues.search()
    assert tenant not in queues._queues
    assert queues.num_redelivered == num_redelivered + 2
    heard = await _hear_tenants(gateway, "acme")
    await _publish(gateway, "acme", 1)
    await wait_until(lambda: heard == ["acme"])


async def test_tenant_with_few_jobs_does_not_wait_for_all_of_another_s(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    loud, quiet = fresh_name("loud"), fresh_name("quiet")
    await ensure_streams(gateway.js, StreamLimits(), [loud, quiet])
    heard = await _hear_tenants(gateway, loud, quiet)
    await _publish(gateway, loud, 40)
    await _publish(gateway, quiet, 5)
    await make_worker(max_num_seqs=4, simulate=2.0)
    await wait_until(lambda: len(heard) == 45, 30)
    # An equal share would have the five done after about ten results.
    assert heard[:25].count(quiet) == 5


async def test_no_more_is_pulled_than_there_is_room_for_but_one_request_a_tenant(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    tenants = [fresh_name("tenant") for _ in range(3)]
    await ensure_streams(gateway.js, StreamLimits(), tenants)
    for tenant in tenants:
        await _publish(gateway, tenant, 10, max_tokens=2000)
    worker = await make_worker(max_num_seqs=4, simulate=20.0)
    held = worker.worker.consumer._held
    await wait_until(lambda: held.count("batch") >= 4)
    await asyncio.sleep(0.3)
    num_queues = len(worker.worker.consumer._batch_queue._queues)
    assert 4 <= held.count("batch") <= 4 + num_queues


async def test_queue_that_cannot_be_read_keeps_no_other_from_expiry(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = worker.worker.consumer._batch_queue
    monkeypatch.setattr(queues, "_queues", dict.fromkeys(("first", "slow", "last")))
    asked: list[str] = []
    all_asked = asyncio.Event()

    async def expire(tenant: str) -> int:
        asked.append(tenant)
        if tenant == "last":
            all_asked.set()
        if tenant == "slow":
            # Nobody waits for the end of another one's patience.
            async with asyncio.timeout(5):
                await all_asked.wait()
            raise NatsTimeoutError
        return 0

    monkeypatch.setattr(queues._expiry, "expire", expire)
    await queues._expire()
    monkeypatch.undo()
    assert asked == ["first", "slow", "last"]


async def test_jobs_that_come_at_once_are_taken_one_in_each_turn_of_the_loop(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = worker.worker.consumer._batch_queue
    turns = []
    monkeypatch.setattr(queues, "_take", lambda message: turns.append((turn, message.stream_seq)))
    jobs = [QueuedMessage("subject", b"", f"ack.{number}", number, 1, 0) for number in range(4)]
    for job in jobs:
        queues._receive(job)
    waiting = queues.outstanding
    for turn in range(10):  # noqa: B007 - read by the lambda
        await asyncio.sleep(0)
    assert [number for _, number in turns] == [0, 1, 2, 3]
    assert len({when for when, _ in turns}) == 4
    assert waiting == queues.outstanding + 4
