"""What a driver of a batch owns: its output, its lease, and the jobs of its lines, without servers."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock, PropertyMock

import msgspec
import pytest
from nats.js.errors import NotFoundError

from gateway.batches.driver import BatchDriver
from gateway.batches.endpoint import MAX_ACTIVE, BatchRoutes
from gateway.batches.input_lines import InputLine
from gateway.batches.lease import Lease
from gateway.batches.line import BatchLine
from gateway.batches.line_jobs import LineJobs, QueueFullError, _gone
from gateway.batches.log import ReplacedError, Stored
from gateway.batches.output import BatchOutput, patiently
from gateway.batches.record import BatchRecord
from gateway.errors import ApiError
from shared.messages import Cancel, Request, Usage
from shared.objects.store import MissingObjectError, StoreError
from shared.subjects import cancel_subject


def record(**changes: Any) -> BatchRecord:
    fields = {"id": "batch_1", "tenant": "t", "endpoint": "/v1/chat/completions", "input_file_id": "file"}
    fields |= {"completion_window": "24h", "status": "in_progress", "store": "s", "owner": "gateway"}
    return BatchRecord(**{**fields, "created_at": 0, "expires_at": 0, **changes})  # type: ignore[arg-type]


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


async def test_line_that_the_queue_does_not_take_now_is_published_later() -> None:
    jobs: Any = Mock(publish=AsyncMock(side_effect=QueueFullError), find=AsyncMock(return_value=False))
    driver: Any = Mock(_jobs=jobs, _maker=Mock(line_to_publish=AsyncMock()), _sent_before=0)
    assert not await BatchDriver._publish_line(driver, InputLine(1, 0, 9, b"{}"))
    jobs.forget.assert_called_once_with(jobs.note.return_value)


async def test_line_whose_result_is_no_longer_kept_when_its_batch_ends_has_its_custom_id() -> None:
    sent: Any = Mock(place=InputLine(1, 0, 9, b""))
    sent.line.custom_id = "mine"
    jobs: Any = Mock(end_all=AsyncMock(), take=Mock(return_value=([], [sent])))
    type(jobs).lines = PropertyMock(side_effect=[[sent], []])
    driver: Any = Mock(_jobs=jobs)
    await BatchDriver._end_jobs(driver, "cancelled")
    driver._write_error.assert_called_once()
    assert driver._write_error.call_args.args[:2] == (sent.place, "mine")


@pytest.mark.parametrize(("attempt", "is_repeated"), [(0, True), (2, True), (3, False)])
async def test_line_whose_result_is_not_kept_is_published_again_at_most_three_times(
    attempt: int, is_repeated: bool
) -> None:
    jobs = LineJobs(Mock(stats={"reconnects": 0}), Mock(), "t", "batch_1")
    request = Request(id=f"{jobs.prefix(1, attempt)}-0", model="m", tenant="t")
    line: Any = Mock(requests=[request], without_prompts=lambda: BatchLine("mine", Mock(), [request]))
    jobs.note(InputLine(1, 0, 9, b""), line, attempt)
    jobs._heard.append(msgspec.json.encode(_gone(request)))
    assert list(map(len, jobs.take())) == [not is_repeated, is_repeated]


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
