"""A worker pulls from the batch queues of all tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer import batch_queues as batch_queues_module
from gpu_worker.consumer.batch_lane import MAX_BACKGROUND
from gpu_worker.consumer.batch_queues import BatchQueues
from gpu_worker.consumer.queued_message import REDELIVER, REDELIVER_LATER, QueuedMessage
from shared.batch_streams import batch_stream
from shared.consumers import PullConsumer
from shared.errors import DependencyError
from shared.sampling import Sampling
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import Queue
from shared.task_supervisor import TaskSupervisor
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway, fresh_name, wait_until


async def _publish(
    gateway: TestGateway, tenant: str, num_jobs: int, max_tokens: int = 8, queue: Queue = "batch"
) -> list[str]:
    """Publish jobs and return their ids."""
    ids = []
    for _ in range(num_jobs):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        is_background = queue == "background"
        job = gateway.request(lane="batch", tenant=tenant, reply=None, sampling=sampling, is_background=is_background)
        await gateway.publish_job(job, queue)
        ids.append(job.id)
    return ids


async def _hear(gateway: TestGateway, *tenants: str, field: str = "tenant") -> list[str]:
    """Return a list to which a field of each result is added."""
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(json.loads(message.data)[field])

    for tenant in tenants:
        await gateway.nats.subscribe(f"hr.stored.{tenant}.*", cb=note)
    return heard


async def test_queue_made_while_a_worker_runs_is_found(worker: RunningWorker, gateway: TestGateway) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    heard = await _hear(gateway, tenant)
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
    heard = await _hear(gateway, "acme")
    await _publish(gateway, "acme", 1)
    await wait_until(lambda: heard == ["acme"])


async def test_tenant_with_few_jobs_does_not_wait_for_all_of_another_s(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    loud, quiet = fresh_name("loud"), fresh_name("quiet")
    await ensure_streams(gateway.js, StreamLimits(), [loud, quiet])
    heard = await _hear(gateway, loud, quiet)
    await _publish(gateway, loud, 40)
    await _publish(gateway, quiet, 5)
    await make_worker(max_num_seqs=4, simulate=2.0)
    await wait_until(lambda: len(heard) == 45, 30)
    # An equal share would have the five done after about ten results.
    assert heard[:25].count(quiet) == 5


async def test_background_responses_do_not_wait_behind_jobs_of_their_tenant(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    await _publish(gateway, tenant, 60, max_tokens=400)
    worker = await make_worker(max_num_seqs=8, simulate=2.0)
    held = worker.worker.consumer._held
    await worker.worker.consumer._batch_queue.search()
    await wait_until(lambda: held.count("batch") >= 8)
    heard = await _hear(gateway, tenant, field="id")
    # More than run at once: the others follow them.
    background = await _publish(gateway, tenant, 12, max_tokens=8, queue="background")
    consumer = f"{gateway.model}-background"
    stream = batch_stream(tenant)

    async def are_done() -> bool:
        info = await gateway.js.consumer_info(stream, consumer)
        return info.num_pending == info.num_ack_pending == 0

    await wait_until(are_done, 20)
    await wait_until(lambda: set(background) <= set(heard), 20)
    # In the order of their publication they would be the last of 72.
    assert max(map(heard.index, background)) < 40
    assert held.num_background == 0


async def test_background_responses_of_a_tenant_beyond_those_that_people_have_room_for_share_the_room_of_jobs(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    await _publish(gateway, tenant, 40, max_tokens=2000, queue="background")
    worker = await make_worker(max_num_seqs=16, simulate=20.0)
    held = worker.worker.consumer._held
    # An idle worker is not kept idle for their sake.
    await wait_until(lambda: held.count("batch") >= 12)
    await asyncio.sleep(0.3)
    assert held.num_background == MAX_BACKGROUND
    assert held.count("batch") <= 16 + 1


async def test_queues_of_jobs_are_pulled_from_where_a_login_may_not_pull_background_responses(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    ensure = batch_queues_module.ensure_consumer

    async def refused(js: object, model: str, queue: Queue, limits: StreamLimits, tenant: str) -> PullConsumer:
        if queue == "background":
            raise DependencyError("NATS does not let us")
        return await ensure(gateway.js, model, queue, limits, tenant)

    monkeypatch.setattr(batch_queues_module, "ensure_consumer", refused)
    heard = await _hear(gateway, tenant)
    await _publish(gateway, tenant, 1)
    await wait_until(lambda: heard == [tenant], 15)


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
    monkeypatch.setattr(queues._lane, "take", lambda message: turns.append((turn, message.stream_seq)))
    jobs = _four_jobs()
    outstanding = queues.outstanding
    for job in jobs:
        queues._receive(job)
    assert queues.outstanding == outstanding + 4
    for turn in range(10):  # noqa: B007 - read by the lambda
        await asyncio.sleep(0)
    assert [number for _, number in turns] == [0, 1, 2, 3]
    assert len({when for when, _ in turns}) == 4
    assert not queues._arrived


def _four_jobs() -> list[QueuedMessage]:
    return [QueuedMessage("subject", b"", f"ack.{number}", number, 1, 0) for number in range(4)]


def _queues(nats: Mock, take: Callable[[QueuedMessage], None]) -> BatchQueues:
    return BatchQueues(nats, "m", StreamLimits(), Mock(), Mock(), Mock(), Mock(), Mock(take=take), TaskSupervisor())


async def test_job_that_cannot_be_taken_goes_back_and_those_behind_it_are_taken() -> None:
    taken: list[int] = []
    failures: list[object] = []

    def take(message: QueuedMessage) -> None:
        if message.stream_seq == 1:
            raise asyncio.CancelledError
        taken.append(message.stream_seq)

    nats, loop = Mock(), asyncio.get_running_loop()
    queues = _queues(nats, take)
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    for job in _four_jobs():
        queues._receive(job)
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken == [0, 2, 3]
    assert len(failures) == 1
    nats.send.assert_called_once_with("ack.1", REDELIVER_LATER)
    assert queues.outstanding == 0


async def test_drain_that_is_cancelled_gives_back_what_has_arrived() -> None:
    nats = Mock()
    queues = _queues(nats, Mock())
    queues._queues["t"] = Mock(drain=asyncio.Event().wait)
    queues._arrived.extend(_four_jobs())
    drain = asyncio.create_task(queues.drain())
    await asyncio.sleep(0.01)
    drain.cancel()
    await asyncio.wait([drain])
    assert [call.args for call in nats.send.mock_calls] == [(f"ack.{number}", REDELIVER) for number in range(4)]


async def test_job_that_arrives_in_the_turn_of_a_drain_goes_back_and_nothing_fails() -> None:
    failures: list[object] = []
    nats, lane = Mock(), Mock()
    queues = _queues(nats, lane)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    queues._receive(_four_jobs()[0])
    await queues.drain()
    await asyncio.sleep(0)
    nats.send.assert_called_once_with("ack.0", REDELIVER)
    lane.assert_not_called()
    assert not failures


class _Queue:
    """A pull queue that pulls nothing; it may be asked for its room."""

    outstanding = num_redelivered = 0

    def __init__(self, nats: object, stream: str, ensure: object, room: Callable[[], int], *rest: object) -> None:
        # By its tenant.
        self.backlog = {"a": 9, "b": 2, "c": 0}[stream.rpartition("_")[2]]
        self.room = room

    async def start(self) -> None:
        pass


@pytest.mark.parametrize(
    ("room_for_jobs", "num_arrived", "num_background", "jobs", "background"),
    [
        # Four queues with a backlog share the room, and one pull waits at each of the others.
        (12, 0, 0, [3, 3, 1], [5, 2, 1]),
        (12, 4, 0, [2, 2, 1], [5, 2, 1]),
        (2, 0, 0, [1, 1, 1], [5, 2, 1]),
        (0, 0, 0, [0, 0, 0], [5, 2, 1]),
        # Those that people wait for are a few of each tenant; beyond them they share the room of jobs.
        (12, 0, MAX_BACKGROUND - 3, [3, 3, 1], [3, 2, 1]),
        (12, 0, MAX_BACKGROUND, [3, 3, 1], [3, 3, 1]),
        (0, 0, MAX_BACKGROUND, [0, 0, 0], [0, 0, 0]),
    ],
)
async def test_room_is_shared_by_the_queues_in_which_something_waits(
    monkeypatch: pytest.MonkeyPatch,
    room_for_jobs: int,
    num_arrived: int,
    num_background: int,
    jobs: list[int],
    background: list[int],
) -> None:
    made: list[_Queue] = []

    async def tenants(*of_model: object) -> list[str]:
        return ["a", "b", "c"]

    def pull_queue(*args: Any) -> _Queue:
        made.append(_Queue(*args))
        return made[-1]

    monkeypatch.setattr(batch_queues_module, "PullQueue", pull_queue)
    monkeypatch.setattr(batch_queues_module, "batch_tenants", tenants)
    held = Mock(has_suspect=False, num_background_of=lambda tenant: num_background)
    # Seven people's requests wait, and the engine allows 256 batch sequences.
    capacity = Mock(interactive=lambda *asked: {(7,): 5}[asked], batch=lambda *asked: {(7, 256): room_for_jobs}[asked])
    lane = Mock(results=Mock(is_blocked=False), trials=Mock(is_active=False))
    engine = Mock(stats=Mock(max_batch_seqs=256))
    queues = BatchQueues(Mock(), "m", StreamLimits(), engine, held, capacity, Mock(backlog=7), lane, TaskSupervisor())
    await queues.search()
    for number in range(num_arrived):
        queues._receive(QueuedMessage("subject", b"", "ack", number, 1, 0))
    rooms = [queue.room() for queue in made]
    assert sorted(rooms[:3], reverse=True) == jobs
    assert sorted(rooms[3:], reverse=True) == background
    for place, name in ((held, "has_suspect"), (lane.results, "is_blocked"), (lane.trials, "is_active")):
        setattr(place, name, True)
        assert [queue.room() for queue in made] == [0] * 6
        setattr(place, name, False)
