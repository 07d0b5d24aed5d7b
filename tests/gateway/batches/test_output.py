"""What a driver of a batch owns: its output, its lease, and the jobs of its lines, without servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, PropertyMock, call

import msgspec
import pytest
from nats.errors import MaxPayloadError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import NotFoundError

from gateway.admission.stored_reads import StoredReads
from gateway.batches.driver import BatchDriver
from gateway.batches.endpoint import MAX_ACTIVE, BatchRoutes
from gateway.batches.input_lines import InputLine
from gateway.batches.lease import Lease
from gateway.batches.line import BatchLine
from gateway.batches.line_answer import WrittenLine
from gateway.batches.line_jobs import LineJobs, QueueFullError, _gone
from gateway.batches.log import ReplacedError, Stored
from gateway.batches.output import BatchOutput, patiently
from gateway.batches.record import BatchRecord
from gateway.batches.set_aside import SetAside
from gateway.errors import ApiError
from gateway.generation import Generation, Prompt
from shared.kept_results import JOB_ENDED
from shared.media import IMAGE_NOT_FOUND
from shared.messages import BatchResult, Cancel, Request, Usage
from shared.objects.store import MissingObjectError, StoreError
from shared.sampling import Sampling
from shared.subjects import cancel_subject, stored_subject

GENERATION = Generation("completion", "m", (Prompt(1, text="a"),), 1, Sampling(), deterministic=True)


def record(**changes: Any) -> BatchRecord:
    fields = {"id": "batch_1", "tenant": "t", "endpoint": "/v1/chat/completions", "input_file_id": "file"}
    fields |= {"completion_window": "24h", "status": "in_progress", "store": "s", "owner": "gateway"}
    return BatchRecord(**{**fields, "created_at": 0, "expires_at": 0, **changes})  # type: ignore[arg-type]


def test_batches_of_one_input_have_outputs_of_their_own() -> None:
    ids = [record(id=f"batch_{number}").file_id("output") for number in range(2)]
    assert ids == ["file-0-output", "file-1-output"]


async def test_line_that_comes_while_a_part_is_written_is_in_the_next_part() -> None:
    lease: Any = Mock(record=record(), save=AsyncMock())
    written: list[bytes] = []

    async def write_part(key: str, data: bytes) -> None:
        written.append(data)
        if len(written) == 1:
            output.add(2, b"second", is_answer=False)

    output = BatchOutput(Mock(write_part=write_part), lease)
    output.add(1, b"first", is_answer=True, usage=Usage(3, 4))
    for _ in range(2):
        await output.flush()
    assert written == [b"first\n", b"second\n"]
    assert (lease.record.completed, lease.record.failed, len(lease.record.parts)) == (1, 1, 2)
    assert lease.save.await_count == 2
    assert (lease.record.usage.prompt_tokens, lease.record.usage.completion_tokens) == (3, 4)


async def test_batch_that_is_released_has_no_owner_and_one_that_was_lost_is_left_alone() -> None:
    log: Any = Mock(put=AsyncMock(return_value=8))
    lease = Lease(log, Stored(record(), 7))
    await lease.release()
    ((stored, revision), _) = log.put.call_args
    assert (stored.owner, revision, lease.revision) == ("", 7, 8)
    log.put.side_effect = ReplacedError
    await lease.release()
    assert lease.revision == 8


async def test_jobs_of_a_batch_that_is_to_end_are_cancelled_for_their_tenant_alone() -> None:
    nats: Any = Mock(stats={"reconnects": 0})
    jobs = LineJobs(nats, Mock(), "t", "batch_1")
    jobs._ask_to_end(Request(id=f"batch_1-{number}-0", model=model, tenant="t") for number, model in enumerate("mnm"))
    asked = {subject: msgspec.msgpack.decode(data, type=Cancel) for (subject, data), _ in nats.send.call_args_list}
    assert asked == {
        cancel_subject("m"): Cancel(("batch_1-0-0", "batch_1-2-0"), tenant="t"),
        cancel_subject("n"): Cancel(("batch_1-1-0",), tenant="t"),
    }


def test_results_of_one_line_are_taken_in_a_time_that_grows_with_their_number() -> None:
    def taken_s(number: int) -> float:
        jobs = LineJobs(cast("Any", Mock(stats={"reconnects": 0})), Mock(), "t", "batch_1")
        requests = [Request(id=f"batch_1-1-{index}", model="m", tenant="t") for index in range(number)]
        jobs.note(InputLine(1, 0, 9, b""), BatchLine("a", GENERATION, requests))
        for request in requests:
            result = BatchResult(id=request.id, model="m", tenant="t", text="", finish="stop")
            jobs._heard.append(msgspec.json.encode(result))
        began = time.thread_time()
        complete, repeated = jobs.take()
        seconds = time.thread_time() - began
        assert [len(each.line.results) for each in complete] == [number]
        assert not repeated
        return seconds

    # The shortest of some: a collection of garbage takes as long as all.
    few, many = (min(taken_s(number) for _ in range(4)) for number in (256, 2048))
    assert many < 24 * few


async def test_results_that_are_there_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.line_jobs._LOOK_AFTER_S", 0.0)
    kept: Any = Mock(result=AsyncMock(return_value=None))
    jobs = LineJobs(cast("Any", Mock(stats={"reconnects": 0})), kept, "t", "batch_1")
    requests = [Request(id=f"batch_1-1-{index}", model="m", tenant="t") for index in range(3)]
    jobs.note(InputLine(1, 0, 9, b""), BatchLine("a", GENERATION, requests))
    result = BatchResult(id=requests[1].id, model="m", tenant="t", text="", finish="stop")
    jobs._heard.append(msgspec.json.encode(result))
    assert jobs.take() == ([], [])
    await jobs.look()
    assert [call.args[1] for call in kept.result.call_args_list] == [requests[0].id, requests[2].id]


async def test_large_results_are_read_beside_the_event_loop() -> None:
    bodies: Any = Mock(in_thread=AsyncMock(return_value=WrittenLine(b"{}", is_answer=True, reasoning_tokens=0)))
    driver: Any = Mock(_services=Mock(bodies=bodies), tenant="t")
    for text, is_beside in (("a", False), ("a" * 5000, True)):
        bodies.in_thread.reset_mock()
        line = BatchLine("a", GENERATION, [Request(id="1-0", model="m", text="x")])
        line.results["1-0"] = BatchResult(id="1-0", model="m", tenant="t", text=text, finish="stop")
        await BatchDriver._answer(driver, Mock(line=line, place=InputLine(1, 0, 9, b"")))
        assert bodies.in_thread.await_count == is_beside


@pytest.mark.parametrize("is_full", [False, True])
async def test_line_that_finds_no_room_now_is_published_later_and_may_have_jobs_if_the_queue_was_asked(
    is_full: bool,
) -> None:
    jobs: Any = Mock(publish=AsyncMock(side_effect=QueueFullError))
    maker: Any = Mock(line_to_publish=AsyncMock(return_value=Mock(requests=[Mock()] * 3)))
    driver: Any = Mock(_jobs=jobs, _maker=maker, _sent_before=0, _most_jobs=1, _is_full=is_full, _partly_sent=set())
    assert not await BatchDriver._publish_line(driver, InputLine(1, 0, 9, b"{}"))
    assert (driver._partly_sent, driver._most_jobs) == (set() if is_full else {1}, 3)
    assert [call.args for call in jobs.forget.call_args_list] == ([] if is_full else [(jobs.note.return_value,)])
    assert jobs.publish.await_count == (not is_full)


def test_batch_that_was_cancelled_before_it_expired_is_cancelled() -> None:
    driver: Any = Mock(_lease=Mock(record=record(), is_cancelled=True))
    driver._services.clock.now.return_value = 1.0
    assert BatchDriver._must_end(driver) == "cancelled"
    driver._lease.is_cancelled = False
    assert BatchDriver._must_end(driver) == driver._lease.record.ends_as == "expired"


async def test_line_too_large_for_a_message_is_refused_and_the_batch_goes_on() -> None:
    driver: Any = Mock(_jobs=Mock(publish=AsyncMock(side_effect=MaxPayloadError)), _sent_before=0, _most_jobs=1)
    driver.configure_mock(_is_full=False, _maker=Mock(line_to_publish=AsyncMock(return_value=Mock(requests=[Mock()]))))
    assert await BatchDriver._publish_line(driver, InputLine(1, 0, 9, b"{}"))
    driver._jobs.forget.assert_called_once_with(driver._jobs.note.return_value)
    assert driver._refuse.call_args.args[1].code == "request_too_large"


async def test_line_whose_result_is_no_longer_kept_when_its_batch_ends_has_its_custom_id() -> None:
    sent: Any = Mock(place=InputLine(1, 0, 9, b""))
    sent.line.custom_id = "mine"
    jobs: Any = Mock(end_all=AsyncMock(), take=Mock(return_value=([], [sent])))
    type(jobs).lines = PropertyMock(side_effect=[[sent], []])
    driver: Any = Mock(_jobs=jobs)
    await BatchDriver._end_jobs(driver, "cancelled")
    driver._write_error.assert_called_once()
    assert driver._write_error.call_args.args[:2] == (sent.place, "mine")


@pytest.mark.parametrize(
    ("code", "attempt", "is_repeated"),
    [
        *((JOB_ENDED, attempt, attempt < 3) for attempt in (0, 2, 3)),
        # Each time its images are stored for an eighth of the batch's window.
        *((IMAGE_NOT_FOUND, attempt, attempt < 7) for attempt in (0, 6, 7)),
    ],
)
async def test_line_whose_result_or_image_is_not_kept_is_published_again_some_times(
    code: str, attempt: int, is_repeated: bool
) -> None:
    jobs = LineJobs(Mock(stats={"reconnects": 0}), Mock(), "t", "batch_1")
    request = Request(id=f"{jobs.prefix(1, attempt)}-0", model="m", tenant="t")
    line: Any = Mock(requests=[request], without_prompts=lambda: BatchLine("mine", Mock(), [request]))
    jobs.note(InputLine(1, 0, 9, b""), line, attempt)
    gone = msgspec.structs.replace(_gone(request), error_code=code)
    jobs._heard.append(msgspec.json.encode(gone))
    assert list(map(len, jobs.take())) == [not is_repeated, is_repeated]


async def test_end_of_a_batch_is_written_again_each_second_while_nats_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = AsyncMock()
    monkeypatch.setattr(asyncio, "sleep", slept)
    driver: Any = Mock(_lease=Mock(record=record(), revision=7), _services=Mock(catalog=AsyncMock()))
    driver._services.log.end = AsyncMock(side_effect=[NatsTimeoutError, NatsTimeoutError, None])
    await BatchDriver._close(driver)
    assert driver._services.log.end.await_args_list == [call(driver._lease.record, 7)] * 3
    assert slept.await_args_list == [call(1.0)] * 2


async def test_work_on_a_store_that_fails_is_done_again_and_each_failure_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.batches.output._RETRY_S", 0.01)
    catalog, failures = Mock(), [StoreError("full"), StoreError("full still")]
    work = AsyncMock(side_effect=[*failures, "written", MissingObjectError("gone")])
    assert await patiently(catalog, work) == "written"
    assert [each.args for each in catalog.note_failure.call_args_list] == [(error,) for error in failures]
    with pytest.raises(MissingObjectError):
        await patiently(catalog, work)
    assert work.await_count == 4


@pytest.mark.parametrize(
    ("num_active", "error", "status", "code"),
    [
        (0, NotFoundError, 400, "batch_unavailable"),
        (MAX_ACTIVE, None, 429, "too_many_batches"),
        (MAX_ACTIVE - 1, None, 200, None),
    ],
)
async def test_batch_needs_a_queue_and_a_place_among_those_of_its_tenant(
    num_active: int, error: type[Exception] | None, status: int, code: str | None
) -> None:
    nats: Any = Mock()
    nats.jetstream.return_value.stream_info = AsyncMock(side_effect=error)
    log: Any = Mock(list_active=AsyncMock(return_value=[(1, "batch")] * num_active))
    routes = BatchRoutes(Mock(), Mock(), log, Mock(), nats, Mock())
    told = (200, None)
    try:
        await routes._check_queue("t")
    except ApiError as refused:
        told = (refused.status, refused.code)
    assert told == (status, code)


async def test_cancelling_counts_as_a_read_and_has_its_turn() -> None:
    lease: Any = Mock()
    limiter: Any = Mock(admit_read=AsyncMock(side_effect=[lease, ApiError(429, "enough", code="rate_limit_exceeded")]))
    log: Any = Mock(active=AsyncMock(return_value=None), get=AsyncMock(return_value=None))
    services: Any = Mock(reads=StoredReads(limiter))
    routes = BatchRoutes(services, Mock(), log, Mock(), Mock(), Mock())
    request: Any = Mock(path_params={"batch_id": "batch_1"})
    for status in (404, 429):
        with pytest.raises(ApiError) as refused:
            await routes._cancel(request, Mock(tenant="t"))
        assert refused.value.status == status
    lease.release.assert_called_once_with(1)
    log.active.assert_awaited_once()


def test_lines_that_are_set_aside_are_not_gone_through_when_a_result_comes() -> None:
    aside, driver = SetAside(), Mock(_jobs=Mock(lines=[]))
    driver._aside = aside
    assert BatchDriver._is_all_answered(driver, [])
    aside.wait(InputLine(1, 0, 9, b""), 0, "images")
    driver._unanswered.side_effect = AssertionError
    assert not BatchDriver._is_all_answered(driver, [])


async def test_results_of_other_batches_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = LineJobs(Mock(stats={"reconnects": 0}), Mock(), "t", "batch_1")
    decoded = Mock(side_effect=jobs._decode)
    monkeypatch.setattr(jobs, "_decode", decoded)
    result = msgspec.json.encode(BatchResult(id="x", model="m", tenant="t", text="", finish="stop"))
    for batch_id, count in (("batch_2", 0), ("batch_1", 1)):
        jobs._hear(Mock(subject=stored_subject("t", f"{batch_id}-1-0"), data=result))
        assert jobs.take() == ([], [])
        assert decoded.call_count == count


async def test_results_are_decoded_once_while_jobs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.line_jobs._WORKERS_ANSWER_S", 0.5)
    kept: Any = Mock(result=AsyncMock(return_value=None), store=AsyncMock(return_value=True))
    jobs = LineJobs(cast("Any", Mock(stats={"reconnects": 0})), kept, "t", "batch_1")
    requests = [Request(id=f"batch_1-1-{index}", model="m", tenant="t") for index in range(3)]
    jobs.note(InputLine(1, 0, 9, b""), BatchLine("a", GENERATION, requests))
    results = [BatchResult(id=request.id, model="m", tenant="t", text="", finish="stop") for request in requests]
    jobs._heard += [msgspec.json.encode(each) for each in results[:2]]
    decoded = Mock(side_effect=jobs._decode)
    monkeypatch.setattr(jobs, "_decode", decoded)
    await jobs.end_all("cancelled", 1.0)
    assert decoded.call_count == 2
    assert [call.args[1] for call in kept.store.call_args_list] == [requests[2].id]
    complete, _ = jobs.take()
    assert [sorted(each.line.results) for each in complete] == [[each.id for each in requests]]


async def test_thousands_of_jobs_are_looked_for_and_ended_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.line_jobs._WORKERS_ANSWER_S", 0.0)
    most = 0

    async def called(*args: Any) -> None:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)

    kept: Any = Mock(result=AsyncMock(side_effect=called), store=AsyncMock(side_effect=called), stored=AsyncMock())
    kept.stored.return_value = b""
    jobs = LineJobs(cast("Any", Mock(stats={"reconnects": 0})), kept, "t", "batch_1")
    requests = [Request(id=f"batch_1-1-{index}", model="m", tenant="t") for index in range(1000)]
    sent = jobs.note(InputLine(1, 0, 9, b""), BatchLine("a", GENERATION, requests))
    assert not await jobs.find(sent)
    assert kept.result.await_count < 1000
    await jobs.end_all("cancelled", 1.0)
    assert kept.store.await_count == 1000
    assert 1 < most < 200
