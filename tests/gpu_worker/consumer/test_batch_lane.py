from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from nats.js.errors import NotFoundError

from gpu_worker.consumer.batch_job import RefusedJobError, read_job
from gpu_worker.consumer.batch_lane import MAX_BACKGROUND, BatchLane
from gpu_worker.consumer.batch_progress import is_due
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.batch_progress import BatchProgress
from shared.batch_streams import batch_stream
from shared.dead_letters import DeadLetter
from shared.disaggregation import KvReady
from shared.kept_results import JobEnd
from shared.kv_budget import EvictedBlocks
from shared.messages import BatchResult, Request, encode
from shared.sampling import DefaultedName, Sampling, SamplingDefaults
from shared.streams import ENDS_STREAM, PROGRESS_STREAM, StreamLimits
from shared.subjects import (
    dead_letter_subject,
    end_subject,
    progress_subject,
    request_subject,
    result_subject,
)
from tests.gpu_worker.consumer.harness import (
    DEMO_MODEL,
    TOKENIZER,
    MakeWorker,
    RunningWorker,
    TestGateway,
    fresh_name,
    wait_until,
)

BATCH = batch_stream("acme")


def _request(gateway: TestGateway, text: str | None = "x = ", **fields: Any) -> Request:
    fields.setdefault("sampling", Sampling(max_tokens=12, ignore_eos=True, seed=1))
    fields.setdefault("tenant", "acme")
    return gateway.request(text, lane="batch", reply=fields.pop("reply", None), **fields)


async def _submit(gateway: TestGateway, text: str | None = "x = ", **fields: Any) -> Request:
    """Publish a job and return it."""
    return await gateway.publish_job(_request(gateway, text, **fields))


async def test_result_says_in_which_format_its_model_writes(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_format", "hermes")
    await make_worker()
    request = await _submit(gateway)
    assert (await gateway.result(request.id)).chat_format == "hermes"


async def test_job_that_says_no_time_has_that_of_its_storage_in_its_result(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    request = _request(gateway)
    assert request.created == 0.0
    await gateway.publish_job(request)
    result = await gateway.result(request.id)
    assert abs(result.created - time.time()) < 60
    assert result.created <= result.completed


async def test_worker_whose_clock_is_set_tells_ends_by_the_clock_of_nats(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    request = await _submit(gateway)
    result = await gateway.result(request.id)
    end = await gateway.js.get_last_msg(ENDS_STREAM, end_subject(request.tenant, request.id))
    ended = msgspec.msgpack.decode(end.data or b"", type=JobEnd).ended
    assert max(abs(told - now()) for told in (result.completed, ended)) < 60


async def test_batch_request_leaves_one_result_and_is_acknowledged(worker: RunningWorker, gateway: TestGateway) -> None:
    request = await _submit(gateway, created=5.0)
    result = await gateway.result(request.id)
    assert (result.finish, result.completion_tokens, result.attempt) == ("length", 12, 1)
    assert result.text == TOKENIZER.decode(result.token_ids)
    assert len(result.token_ids) == 12
    assert result.prompt_tokens == len(TOKENIZER.encode_text("x = "))
    assert (result.worker, result.tenant, result.model, result.created) == (worker.name, "acme", gateway.model, 5.0)
    await gateway.wait_until_acknowledged(BATCH)


async def test_cancelled_batch_request_ends_with_what_it_has(make_worker: MakeWorker, gateway: TestGateway) -> None:
    await make_worker()
    sampling = Sampling(max_tokens=4000, ignore_eos=True, seed=1)
    cancelled, other = _request(gateway, sampling=sampling), _request(gateway)
    await gateway.publish_job(cancelled)
    await gateway.publish_job(other)
    # The other one has run to its end beside it, so it has begun.
    await gateway.result(other.id)
    await gateway.cancel(cancelled.id, "unknown", tenant="acme")
    result = await gateway.result(cancelled.id)
    assert result.finish == "cancelled"
    assert 0 < result.completion_tokens < 4000
    assert result.text == TOKENIZER.decode(result.token_ids)
    await gateway.wait_until_acknowledged(BATCH)


async def test_cancellation_ends_the_jobs_of_its_tenant_or_a_persons_request(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=2.0)
    sampling = Sampling(max_tokens=400, ignore_eos=True, seed=1)
    # A request of a person, too, has this id.
    job, person = _request(gateway, sampling=sampling), gateway.request(sampling=sampling)
    person = msgspec.structs.replace(person, id=job.id)
    for tenant in ("acme", "mallory"):
        await gateway.publish_job(msgspec.structs.replace(job, tenant=tenant))
    answer = await gateway.publish(person)
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 3)
    await gateway.cancel(job.id, tenant="mallory")
    assert (await gateway.result(job.id, "mallory")).finish == "cancelled"
    await gateway.cancel(job.id)
    assert (await answer.wait()).finish.reason == "cancelled"
    result = await gateway.result(job.id)
    assert (result.tenant, result.finish, result.completion_tokens) == ("acme", "length", 400)


async def test_job_whose_message_comes_after_its_cancellation_never_runs(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker()
    cancelled, other = _request(gateway, tenant="acme"), _request(gateway, tenant="acme")
    await gateway.cancel(cancelled.id, tenant="acme")
    await gateway.cancel(other.id, tenant="mallory")
    for job in (cancelled, other):
        await gateway.publish_job(job)
    result = await gateway.result(cancelled.id)
    assert (result.finish, result.completion_tokens) == ("cancelled", 0)
    assert (await gateway.result(other.id)).finish == "length"
    # The engine was given the other one alone.
    assert worker.worker._engine.stats.num_prefix_queries == len(TOKENIZER.encode_text(other.text or ""))


async def test_json_request_is_accepted_and_its_reply_subject_gets_the_result(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    subject = f"hr.reply.acme.{fresh_name('reply')}"
    replies = await gateway.nats.subscribe(subject)
    request = _request(gateway, reply=subject)
    await gateway.publish_raw(msgspec.json.encode(request), "batch", "acme")
    reply = await replies.next_msg(timeout=5)
    assert msgspec.json.decode(reply.data, type=BatchResult) == await gateway.result(request.id)


@pytest.mark.parametrize(
    "subject", ["hr.cancel.other", "$JS.ACK.HR_INTERACTIVE.c.1.1.1.1.0", "_INBOX.other", "hr.reply.other.x"]
)
async def test_job_with_a_reply_subject_that_is_not_its_tenant_s_fails_and_nothing_is_sent(
    worker: RunningWorker, gateway: TestGateway, subject: str
) -> None:
    forged = await gateway.nats.subscribe(subject)
    request = await _submit(gateway, reply=subject)
    result = await gateway.result(request.id)
    assert (result.finish, result.error) == ("failed", "reply must be a subject that begins with 'hr.reply.acme.'")
    await gateway.wait_until_acknowledged(BATCH)
    await gateway.nats.flush()
    assert forged.pending_msgs == 0


async def test_job_that_claims_another_tenant_fails_for_the_tenant_of_its_subject(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    request = _request(gateway, tenant="victim")
    await gateway.publish_job(request, tenant="mallory")
    result = await gateway.result(request.id, "mallory")
    assert (result.tenant, result.finish) == ("mallory", "failed")
    assert "the job says tenant 'victim'" in (result.error or "")
    assert await gateway.results(request.id, "victim") == []


@pytest.mark.parametrize("token", ["_61cme", "_ff", "_00", "x" * 200])
async def test_job_under_a_subject_that_encodes_no_name_is_discarded(
    worker: RunningWorker, gateway: TestGateway, token: str
) -> None:
    acknowledgements = gateway.nats.new_inbox()
    told = await gateway.nats.subscribe(acknowledgements)
    await gateway.nats.flush()
    subject = f"hr.req.{gateway.model}.batch.{token}"
    # No stream has such a subject but one that an operator has given it.
    worker.worker.consumer._batch.take(QueuedMessage(subject, encode(_request(gateway)), acknowledgements, 1, 1, 0))
    assert (await told.next_msg(timeout=10)).data == b"+TERM"


async def test_first_result_stays(worker: RunningWorker, gateway: TestGateway) -> None:
    request = _request(gateway)
    await gateway.js.publish(result_subject("acme", request.id), msgspec.json.encode({"first": True}))
    await gateway.publish_job(request)
    await gateway.wait_until_acknowledged(BATCH)
    message = await gateway.js.get_last_msg("HR_RESULTS", result_subject("acme", request.id))
    assert message.data == b'{"first":true}'


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sampling": {"temperature": 99}}, "temperature"),
        ({"text": None}, "exactly one"),
        ({"model": "x"}, "says model"),
        ({"sampling": {"max_token": 3}}, "sampling has no field 'max_token'; did you mean 'max_tokens'?"),
    ],
)
async def test_request_that_can_never_run_has_a_failed_result(
    worker: RunningWorker, gateway: TestGateway, change: dict[str, Any], problem: str
) -> None:
    request_id = fresh_name("r")
    fields = {"type": "request", "id": request_id, "model": gateway.model, "tenant": "acme", "text": "x"} | change
    payload = msgspec.json.encode({key: value for key, value in fields.items() if value is not None})
    await gateway.publish_raw(payload, "batch", "acme")
    result = await gateway.result(request_id)
    assert result.finish == "failed"
    assert problem in (result.error or "")
    assert abs(result.created - time.time()) < 60
    await gateway.wait_until_acknowledged(BATCH)


async def test_more_bad_messages_than_a_consumer_may_hold_do_not_block_the_lane(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(max_ack_pending=200)
    for payload in [b"", b"{", b"\xc1"] * 100:
        await gateway.nats.publish(request_subject(gateway.model, "batch", "acme"), payload)
    request = await _submit(gateway)
    await make_worker(limits=limits)
    # A hundred pulls, one after the other: long where each waits for a processor.
    assert (await gateway.result(request.id, timeout_s=60)).finish == "length"
    info = await gateway.js.consumer_info(BATCH, f"{gateway.model}-batch")
    assert info.config.max_ack_pending == limits.max_ack_pending
    await gateway.wait_until_acknowledged(BATCH)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xc1", b"[" * 5000, b'{"id": "bad id"}'])
async def test_payload_that_is_no_request_is_discarded(
    worker: RunningWorker, gateway: TestGateway, payload: bytes
) -> None:
    await gateway.publish_raw(payload, "batch", "acme")
    await gateway.wait_until_acknowledged(BATCH)


async def test_job_that_is_delivered_again_while_it_runs_is_answered_by_its_last_delivery(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=5.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=60, ignore_eos=True))
    table = worker.worker.consumer._held
    await wait_until(lambda: len(table) == 1)
    (held,) = table
    again = dataclasses.replace(held.message, num_delivered=2)
    worker.worker.consumer._batch.take(again)
    assert [(each, each.message) for each in table] == [(held, again)]
    assert (await gateway.result(request.id)).attempt == 2


async def test_batch_request_of_a_worker_that_withdraws_is_delivered_to_another(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    worker = await make_worker(simulate=20.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=300, ignore_eos=True))
    await wait_until(lambda: any(held.num_output_tokens > 3 for held in worker.worker.consumer._held))
    other = await make_worker(simulate=0.0)
    await worker.worker.consumer.withdraw("rank 1 is gone")
    result = await gateway.result(request.id)
    assert (result.finish, result.worker) == ("length", other.name)


async def test_batch_work_gives_way_to_interactive_requests(make_worker: MakeWorker, gateway: TestGateway) -> None:
    worker = await make_worker(max_num_seqs=4, simulate=2.0)
    batch = [_request(gateway, sampling=Sampling(max_tokens=400, ignore_eos=True)) for _ in range(8)]
    for request in batch:
        await gateway.publish_job(request)
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 4)
    answers = [await gateway.publish(gateway.request()) for _ in range(4)]
    for answer in answers:
        await answer.wait()
    # They have waited for no end of a batch request.
    assert [await gateway.results(request.id) for request in batch] == [[]] * 8
    for request in batch:
        assert (await gateway.result(request.id)).completion_tokens == 400


async def test_request_for_which_a_person_waits_runs_beside_people_as_theirs_do(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    # A sequence more takes as long as the step itself, so that batch work has next to nothing beside people.
    worker = await make_worker(simulate=2.0, simulate_growth=1.0)
    answer = await gateway.publish(gateway.request(sampling=Sampling(max_tokens=4000, ignore_eos=True)))
    await answer.wait_for_tokens(20)
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    background = [_request(gateway, sampling=sampling, is_background=True) for _ in range(MAX_BACKGROUND + 2)]
    await gateway.publish_job(background[0])
    assert (await gateway.result(background[0].id, timeout_s=3.0)).completion_tokens == 100
    for request in background[1:]:
        await gateway.publish_job(request)
    await wait_until(lambda: worker.worker.consumer._held.num_background == MAX_BACKGROUND)
    for request in background[1:9]:
        assert (await gateway.result(request.id)).completion_tokens == 100
    assert not answer.finished.is_set()
    await gateway.cancel(*[request.id for request in background], tenant="acme")


@pytest.mark.slow
@pytest.mark.chaos
async def test_sigkilled_worker_leaves_exactly_one_result(
    nats_url: str, make_worker: MakeWorker, gateway: TestGateway
) -> None:
    settings = {
        "HEADRACE_MODEL": str(DEMO_MODEL),
        "HEADRACE_SERVED_MODEL_NAME": gateway.model,
        "HEADRACE_SIMULATE": "20",
        "HEADRACE_NATS_URL": nats_url,
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gpu_worker", env=os.environ | settings)
    requests = [_request(gateway, sampling=Sampling(max_tokens=1500, ignore_eos=True)) for _ in range(3)]
    for request in requests:
        await gateway.publish_job(request)

    async def are_held() -> bool:
        try:
            info = await gateway.js.consumer_info(BATCH, f"{gateway.model}-batch")
        except NotFoundError:
            return False
        return bool(info.num_ack_pending == 3)

    await wait_until(are_held, 20)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    second = await make_worker(simulate=0.0)
    for request in requests:
        result = await gateway.result(request.id, timeout_s=30)
        assert (result.worker, result.attempt) == (second.name, 2)
    await gateway.wait_until_acknowledged(BATCH)


async def test_drained_request_continues_on_another_worker_and_is_no_failed_attempt(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(batch_max_deliver=1)
    first = await make_worker(limits=limits, simulate=5.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=400, ignore_eos=True, seed=3))
    await first.wait_for_heartbeat(lambda heartbeat: heartbeat.step >= 50)
    await first.drain(0.0)
    second = await make_worker(limits=limits, simulate=5.0)
    # The queue delivers what nobody answers after ten seconds.
    result = await gateway.result(request.id, timeout_s=9.0)
    assert (result.worker, result.finish, result.completion_tokens) == (second.name, "length", 400)
    assert result.text == TOKENIZER.decode(result.token_ids)
    # What the first worker generated is not generated again.
    heartbeat = await second.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)
    assert heartbeat.step <= 355
    alone = await _submit(gateway, sampling=request.sampling)
    assert (await gateway.result(alone.id)).token_ids == result.token_ids


async def test_request_that_was_drained_often_is_not_given_up(make_worker: MakeWorker, gateway: TestGateway) -> None:
    limits = StreamLimits(batch_max_deliver=2)
    request = await _submit(gateway, sampling=Sampling(max_tokens=200, ignore_eos=True))
    for _ in range(4):
        worker = await make_worker(limits=limits, simulate=20.0)
        await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1)
        await worker.drain(0.0)
        await worker.close()
    await make_worker(limits=limits, simulate=0.0)
    result = await gateway.result(request.id)
    assert (result.finish, result.completion_tokens, result.attempt) == ("length", 200, 5)


async def test_request_of_a_vanished_worker_continues_from_its_last_record(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(ack_wait_s=1.0, batch_max_deliver=1)
    first = await make_worker(limits=limits, simulate=2.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=1000, ignore_eos=True, stop=("never to be found",)))
    await first.wait_for_heartbeat(lambda heartbeat: heartbeat.step >= 150)
    await first.worker.consumer._batch.save_progress()
    await first.close()
    second = await make_worker(limits=limits, simulate=0.0)
    result = await gateway.result(request.id)
    assert (result.worker, result.finish, result.completion_tokens) == (second.name, "length", 1000)
    assert result.text == TOKENIZER.decode(result.token_ids)
    assert (await second.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)).step <= 850


async def test_first_text_of_a_followed_request_is_recorded_at_once(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_round(lane: BatchLane) -> None:
        """Leave what is followed to the first text."""

    monkeypatch.setattr(BatchLane, "save_followed", no_round)
    await make_worker(simulate=20.0)
    request = _request(gateway, sampling=Sampling(max_tokens=500, ignore_eos=True), is_followed=True)
    heard = await gateway.nats.subscribe(progress_subject("acme", request.id))
    await gateway.publish_job(request)
    record = msgspec.msgpack.decode((await heard.next_msg(timeout=5.0)).data, type=BatchProgress)
    assert 1 <= len(record.token_ids) <= 10
    assert record.text
    await gateway.cancel(request.id, tenant="acme")


async def test_progress_of_a_followed_request_is_recorded_while_it_runs(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    await make_worker(simulate=5.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=240, ignore_eos=True), is_followed=True)
    texts: list[str] = []
    while not await gateway.results(request.id):
        with contextlib.suppress(NotFoundError):
            found = await gateway.js.get_last_msg(PROGRESS_STREAM, progress_subject("acme", request.id))
            texts.append(msgspec.msgpack.decode(found.data or b"", type=BatchProgress).text)
        await asyncio.sleep(0.05)
    result = await gateway.result(request.id)
    # More often than others, and each time with all that is certain.
    assert len(set(texts)) >= 3
    assert all(result.text.startswith(text) for text in texts)


@pytest.mark.parametrize(
    ("is_followed", "was_lost", "num_new", "after_s", "expected"),
    [
        (True, False, 5, 0.25, True),
        (True, False, 5, 0.2, False),
        (True, False, 0, 9.0, False),
        (False, False, 32, 9.0, False),
        (True, False, 32763, 3.9, False),
        (True, False, 32763, 4.0, True),
        (False, True, 32, 0.1, True),
        (False, True, 31, 9.0, False),
        (False, True, 8192, 0.9, False),
    ],
)
def test_long_texts_are_recorded_less_often_and_those_that_lost_a_worker_more_often(
    is_followed: bool, was_lost: bool, num_new: int, after_s: float, expected: bool
) -> None:
    message = QueuedMessage("s", b"", "r", stream_seq=1, num_delivered=1, num_pending=0)
    held = HeldRequest("k", Request(id="r", model="m", is_followed=is_followed), message, was_lost=was_lost)
    held.num_output_tokens, held.num_recorded_tokens, held.recorded_at = num_new + 5, 5, 100.0
    assert is_due(held, 100.0 + after_s) is expected


async def test_echoed_prompt_and_each_log_probability_are_in_a_moved_result_once(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    first = await make_worker(simulate=5.0)
    request = await _submit(gateway, echo=True, sampling=Sampling(max_tokens=100, ignore_eos=True, logprobs=0))
    await first.wait_for_heartbeat(lambda heartbeat: heartbeat.step >= 20)
    await first.drain(0.0)
    await make_worker(simulate=0.0)
    result = await gateway.result(request.id)
    assert result.text == "x = " + TOKENIZER.decode(result.token_ids)
    assert result.attempt == 2
    short = _request(gateway, sampling=Sampling(max_tokens=1, ignore_eos=True, logprobs=0))
    plain = _request(gateway, sampling=Sampling(max_tokens=1, ignore_eos=True))
    for each in (short, plain):
        await gateway.publish_job(each)
    # The simulated model finds all tokens equally likely.
    of_one = (await gateway.result(short.id)).total_logprob
    assert of_one is not None
    assert result.total_logprob == pytest.approx(100 * of_one)
    assert (await gateway.result(plain.id)).total_logprob is None


async def test_record_of_another_request_under_the_same_id_is_not_used(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    request = _request(gateway, id=fresh_name("same"), sampling=Sampling(max_tokens=100, ignore_eos=True, seed=1))
    for sampling in (request.sampling, Sampling(max_tokens=100, ignore_eos=True, seed=2)):
        worker = await make_worker(simulate=10.0)
        queued = msgspec.structs.replace(request, sampling=sampling)
        await gateway.publish_job(queued)
        await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1 and heartbeat.step >= 10)
        if sampling.seed == 2:
            break
        await worker.drain(0.0)
        await gateway.js.purge_stream(batch_stream("acme"))
        await worker.close()
    # It is delivered again, like one whose first worker wrote no record of it.
    await worker.close()
    await make_worker(simulate=0.0, limits=StreamLimits(ack_wait_s=1.0))
    moved = await gateway.result(request.id, timeout_s=20)
    alone = await _submit(gateway, sampling=Sampling(max_tokens=100, ignore_eos=True, seed=2))
    assert moved.token_ids == (await gateway.result(alone.id)).token_ids


def _num_begun(worker: RunningWorker) -> tuple[int, int]:
    """Return how many requests of a worker its engine has, and how many it holds."""
    held = list(worker.worker.consumer._held)
    return sum(each.sequence is not None for each in held), len(held)


async def test_death_of_a_worker_counts_against_what_it_tried_and_not_against_what_waited(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    limits = StreamLimits(ack_wait_s=1.0, batch_max_deliver=2)
    requests = [_request(gateway, sampling=Sampling(max_tokens=40, ignore_eos=True)) for _ in range(2)]
    for request in requests:
        await gateway.publish_job(request)
    # Both have begun on the first worker. The second tries one of them, and the other waits.
    for num_begun in (2, 1):
        worker = await make_worker(limits=limits, simulate=1500.0)
        await wait_until(lambda: _num_begun(worker) == (num_begun, 2), 15)  # noqa: B023
        # What ends is not heard of any more, as of a worker that was killed.
        await worker.nats.close()
    await make_worker(limits=limits, simulate=0.0)
    results = [await gateway.result(request.id) for request in requests]
    assert sorted((result.finish, result.completion_tokens) for result in results) == [("failed", 0), ("length", 40)]
    (failed,) = (result for result in results if result.finish == "failed")
    assert failed.error == "given up after 2 attempts: each lost its worker"


async def test_request_that_is_given_up_leaves_a_dead_letter(make_worker: MakeWorker, gateway: TestGateway) -> None:
    limits = StreamLimits(ack_wait_s=1.0, batch_max_deliver=1)
    first = await make_worker(limits=limits, simulate=20.0)
    request = await _submit(gateway, sampling=Sampling(max_tokens=1500, ignore_eos=True))
    await first.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1)
    await first.close()
    await make_worker(limits=limits)
    result = await gateway.result(request.id)
    assert (result.finish, result.error) == ("failed", "given up after 1 attempts: each lost its worker")
    message = await gateway.js.get_last_msg("HR_DEAD", dead_letter_subject(gateway.model, "batch", "acme"))
    letter = msgspec.msgpack.decode(message.data or b"", type=DeadLetter)
    assert (letter.request.id, letter.reason, "each lost its worker" in letter.error) == (
        request.id,
        "worker_lost",
        True,
    )


async def test_request_whose_record_breaks_the_worker_fails_and_is_not_held_for_ever(
    make_worker: MakeWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = StreamLimits(ack_wait_s=1.0)
    first = await make_worker(limits=limits)
    request = await _submit(gateway, sampling=Sampling(max_tokens=1500, ignore_eos=True))
    await first.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 1)
    await first.close()
    second = await make_worker(limits=limits)

    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(second.worker.consumer._batch._progress, "load", broken)
    result = await gateway.result(request.id)
    assert (result.finish, result.error) == ("failed", "the worker could not continue the request")
    assert len(second.worker.consumer._held) == 0


async def test_what_a_job_leaves_out_is_as_the_model_advises_and_nothing_else() -> None:
    begun: list[HeldRequest] = []
    nothing: Any = None
    intake: Any = SimpleNamespace(begin=lambda held, lane: begun.append(held))

    async def no_end(tenant: str, request_id: str) -> None:
        return None

    results: Any = SimpleNamespace(has=lambda key, message: False, kept=SimpleNamespace(end_of=no_end))
    advised = SamplingDefaults(temperature=0.6, top_p=0.95)
    lane = BatchLane("w", 5, intake, nothing, HeldRequests(), results, nothing, nothing, sampling_defaults=advised)
    for number, left_out in enumerate(((), ("temperature", "top_k"))):
        job = Request(id=f"j{number}", model="m", tenant="acme", text="x", left_out=left_out)
        lane.take(QueuedMessage(request_subject("m", "batch", "acme"), encode(job), "ack", number, 1, 0))
    await lane._tasks.wait()
    plain, filled = (held.request.sampling for held in begun)
    assert plain == Sampling()
    assert filled == Sampling(temperature=0.6)


@pytest.mark.parametrize(("asked", "given"), [(100, 0), (0, 0), (-7, -7)])
def test_priority_and_weight_of_a_job_are_capped_since_no_gateway_has_seen_it(asked: int, given: int) -> None:
    job = Request(id="j", model="m", tenant="acme", text="x", priority=asked, weight=100.0)
    read = read_job(QueuedMessage(request_subject("m", "batch", "acme"), encode(job), "ack", 1, 1, 0), None)
    assert (read.priority, read.weight) == (given, 1.0)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"evicted": EvictedBlocks(16, (1, 2))}, "evicted: leave it out, because a job has evicted nothing"),
        ({"evicted": EvictedBlocks(16, (1, 2)), "emitted": (5,)}, "evicted: leave it out"),
        # A million of them take seconds to go through, in which a worker counts as dead.
        ({"emitted": (5,)}, "emitted: leave it out, because a job has emitted nothing"),
        ({"ready": KvReady("j", 0, "w", "0" * 32)}, "ready: leave it out, because no worker has computed a job"),
    ],
)
def test_job_that_says_what_it_has_had_is_refused_since_only_its_record_knows(
    told: dict[str, Any], problem: str
) -> None:
    job = Request(id="j", model="m", tenant="acme", text="x", **told)
    with pytest.raises(RefusedJobError, match=problem):
        read_job(QueuedMessage(request_subject("m", "batch", "acme"), encode(job), "ack", 1, 1, 0), None)


def test_names_that_a_job_may_leave_out_are_those_that_models_advise() -> None:
    assert get_args(DefaultedName) == SamplingDefaults.__struct_fields__
