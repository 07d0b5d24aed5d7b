"""Jobs that wait for too long get the result `expired`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from gpu_worker.consumer import batch_expiry
from gpu_worker.consumer.batch_expiry import BatchExpiry
from shared.batch_streams import batch_stream
from shared.kept_results import KeptResults
from shared.messages import BatchResult, Request, encode
from shared.result_shares import Piece, ResultShares
from shared.server_clock import ServerClock
from shared.streams import ENDS_STREAM, StreamLimits, ensure_streams
from shared.subjects import Queue, ledger_subject, request_subject, result_subject
from tests.gpu_worker.consumer.harness import TestGateway, fresh_name
from tests.servers import pull_subscription

PassTime = Callable[[float], None]

# Enough that no machine needs as long for a test.
MAX_WAIT_S = 600.0


@pytest.fixture
async def tenant(gateway: TestGateway) -> str:
    """A tenant whose jobs wait for ten minutes at most, and no worker serves the test's model."""
    name = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(tenant_max_wait_s=MAX_WAIT_S), [name])
    return name


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> PassTime:
    """Put NATS's clock, as its answers tell it, this many seconds forward."""
    read = batch_expiry._time

    def put_forward(seconds: float) -> None:
        monkeypatch.setattr(batch_expiry, "_time", lambda text: read(text) + timedelta(seconds=seconds))

    return put_forward


def _expiry(gateway: TestGateway, model: str | None = None) -> BatchExpiry:
    kept = KeptResults(gateway.js, ResultShares(gateway.js, can_purge=True, clock=ServerClock()))
    return BatchExpiry(gateway.nats, kept, model or gateway.model)


async def _publish(gateway: TestGateway, tenant: str, reply: str | None = None, queue: Queue = "batch") -> Request:
    return await gateway.publish_job(gateway.request(lane="batch", tenant=tenant, reply=reply, created=5.0), queue)


async def _num_waiting(gateway: TestGateway, tenant: str) -> int:
    return (await gateway.js.stream_info(batch_stream(tenant))).state.messages


async def test_jobs_that_no_worker_took_in_time_have_an_expired_result(
    gateway: TestGateway, tenant: str, pass_time: PassTime
) -> None:
    jobs = [await _publish(gateway, tenant) for _ in range(3)]
    assert await _expiry(gateway).expire(tenant) == 0
    assert await _num_waiting(gateway, tenant) == 3
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 3
    assert await _num_waiting(gateway, tenant) == 0
    for job in jobs:
        (result,) = await gateway.results(job.id, tenant)
        assert (result.finish, result.tenant, result.model, result.created) == ("expired", tenant, gateway.model, 5.0)
        assert result.error == "no worker took the job within 600 s"


async def test_result_that_is_there_already_stays(gateway: TestGateway, tenant: str, pass_time: PassTime) -> None:
    subject = f"hr.reply.{tenant}.x"
    replies = await gateway.nats.subscribe(subject)
    job = await _publish(gateway, tenant, subject)
    done = BatchResult(id=job.id, model=gateway.model, tenant=tenant, text="done", finish="stop")
    await gateway.js.publish(result_subject(tenant, job.id), msgspec.json.encode(done))
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 1
    assert await gateway.results(job.id, tenant) == [done]
    await gateway.nats.flush()
    assert replies.pending_msgs == 0


async def test_reply_subject_of_an_expired_job_gets_its_result(
    gateway: TestGateway, tenant: str, pass_time: PassTime
) -> None:
    subject = f"hr.reply.{tenant}.x"
    replies = await gateway.nats.subscribe(subject)
    job = await _publish(gateway, tenant, subject)
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 1
    reply = await replies.next_msg(timeout=5)
    assert [msgspec.json.decode(reply.data, type=BatchResult)] == await gateway.results(job.id, tenant)


async def test_expired_job_is_told_on_no_subject_of_another_tenant(
    gateway: TestGateway, tenant: str, pass_time: PassTime
) -> None:
    replies = await gateway.nats.subscribe("hr.reply.another.>")
    await _publish(gateway, tenant, "hr.reply.another.x")
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 1
    await gateway.nats.flush()
    assert replies.pending_msgs == 0


async def test_result_of_an_expired_job_belongs_to_the_tenant_of_its_queue_whatever_the_job_claims(
    gateway: TestGateway, tenant: str, pass_time: PassTime
) -> None:
    another = fresh_name("tenant")
    replies = await gateway.nats.subscribe(f"hr.reply.{another}.>")
    claimed = gateway.request(lane="batch", tenant=another, reply=f"hr.reply.{another}.x")
    claimed = msgspec.structs.replace(claimed, model="another-model")
    await gateway.publish_job(claimed, tenant=tenant)
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 1
    (result,) = await gateway.results(claimed.id, tenant)
    assert (result.finish, result.tenant, result.model) == ("expired", tenant, gateway.model)
    assert await gateway.results(claimed.id, another) == []
    await gateway.nats.flush()
    assert replies.pending_msgs == 0


async def test_job_stays_in_its_queue_until_its_result_is_stored(
    gateway: TestGateway, tenant: str, monkeypatch: pytest.MonkeyPatch, pass_time: PassTime
) -> None:
    job = await _publish(gateway, tenant)
    pass_time(MAX_WAIT_S + 1)
    expiry = _expiry(gateway)
    attempts = 0

    async def refuse(*_: object) -> bool:
        nonlocal attempts
        attempts += 1
        raise NatsTimeoutError

    with monkeypatch.context() as broken:
        broken.setattr(KeptResults, "store", refuse)
        assert await expiry.expire(tenant) == 0
    assert attempts == 1
    assert await _num_waiting(gateway, tenant) == 1
    assert await expiry.expire(tenant) == 1
    assert [result.finish for result in await gateway.results(job.id, tenant)] == ["expired"]


async def test_what_is_no_job_is_removed_too(gateway: TestGateway, tenant: str, pass_time: PassTime) -> None:
    await gateway.publish_raw(b"junk", "batch", tenant)
    pass_time(MAX_WAIT_S + 1)
    assert await _expiry(gateway).expire(tenant) == 1
    assert await _num_waiting(gateway, tenant) == 0


@pytest.mark.parametrize("token", ["*", ">", "a/b", "_5f", "_zz"])
async def test_job_whose_subject_names_no_model_expires_like_others(
    gateway: TestGateway, tenant: str, pass_time: PassTime, token: str
) -> None:
    job = encode(gateway.request(lane="batch", tenant=tenant, reply=None))
    await gateway.nats.request(f"hr.req.{token}.batch.{tenant}", job, timeout=5)
    # Between once and twice the time: when it matters whether a worker has it.
    pass_time(1.5 * MAX_WAIT_S)
    assert await _expiry(gateway).expire(tenant) == 1
    assert await _num_waiting(gateway, tenant) == 0


@pytest.mark.parametrize("queue", ["batch", "background"])
async def test_job_that_a_worker_has_may_take_as_long_again(
    gateway: TestGateway, tenant: str, pass_time: PassTime, queue: Queue
) -> None:
    # A job of the same model that is older in the other queue says nothing of this one.
    both: tuple[Queue, Queue] = ("batch", "background")
    pullers = {each: await pull_subscription(gateway.js, gateway.model, each, tenant) for each in both}
    job = await _publish(gateway, tenant, queue=queue)
    await pullers[queue].fetch(1, timeout=5)
    expiry = _expiry(gateway)
    pass_time(1.5 * MAX_WAIT_S)
    assert await expiry.expire(tenant) == 0
    assert await _num_waiting(gateway, tenant) == 1
    pass_time(2 * MAX_WAIT_S + 1)
    assert await expiry.expire(tenant) == 1
    assert [result.finish for result in await gateway.results(job.id, tenant)] == ["expired"]


async def test_queue_without_a_limit_of_waiting_expires_nothing(gateway: TestGateway) -> None:
    tenant = fresh_name("tenant")
    await ensure_streams(gateway.js, StreamLimits(), [tenant])
    config = (await gateway.js.stream_info(batch_stream(tenant))).config
    await gateway.js.update_stream(config.evolve(metadata={"headrace_max_wait_s": "never"}))
    await _publish(gateway, tenant)
    assert await _expiry(gateway).expire(tenant) == 0


async def test_age_of_the_oldest_job_is_known_after_a_round_and_gone_with_it(
    gateway: TestGateway, tenant: str, pass_time: PassTime
) -> None:
    expiry = _expiry(gateway)
    assert expiry.oldest_s([tenant]) == 0.0
    await _publish(gateway, tenant)
    pass_time(100.0)
    await expiry.expire(tenant)
    assert 100.0 <= expiry.oldest_s([tenant, "another"]) < 200.0
    assert expiry.oldest_s(["another"]) == 0.0
    pass_time(MAX_WAIT_S + 1)
    await expiry.expire(tenant)
    assert await _num_waiting(gateway, tenant) == 0
    await expiry.expire(tenant)
    assert expiry.oldest_s([tenant]) == 0.0


async def test_age_of_a_queue_is_that_of_the_jobs_of_one_model(gateway: TestGateway, tenant: str) -> None:
    """A job of a model that nobody serves waits for days, and says nothing of the others."""
    await _publish(gateway, tenant)
    await asyncio.sleep(0.5)
    other = fresh_name("model")
    served, unserved, unknown = _expiry(gateway, other), _expiry(gateway), _expiry(gateway, fresh_name("model"))
    job = gateway.request(lane="batch", tenant=tenant)
    await gateway.js.publish(request_subject(other, "batch", tenant), encode(job))
    for expiry in (served, unserved, unknown):
        await expiry.expire(tenant)
    assert 0.5 <= unserved.oldest_s([tenant]) < 60
    assert 0 < served.oldest_s([tenant]) <= unserved.oldest_s([tenant]) - 0.4
    assert unknown.oldest_s([tenant]) == 0.0


async def test_end_of_an_expired_job_is_told_by_the_clock_of_nats(
    gateway: TestGateway, tenant: str, monkeypatch: pytest.MonkeyPatch, pass_time: PassTime
) -> None:
    kept = KeptResults(gateway.js, ResultShares(gateway.js, can_purge=True, clock=ServerClock()))
    expiry, now = BatchExpiry(gateway.nats, kept, gateway.model), time.time
    job = await _publish(gateway, tenant)
    monkeypatch.setattr(time, "time", lambda: now() + 36_000)
    pass_time(MAX_WAIT_S + 1)
    assert await expiry.expire(tenant) == 1
    await kept.shares.close()
    (result,), end = await gateway.results(job.id, tenant), await kept.end_of(tenant, job.id)
    ledger = await gateway.js.get_last_msg(ENDS_STREAM, ledger_subject(tenant))
    [piece] = msgspec.msgpack.decode(ledger.data or b"", type=list[Piece])
    assert end is not None
    assert max(abs(told - now()) for told in (result.completed, end.ended, piece.stored)) < 3600
