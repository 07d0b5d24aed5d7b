"""Jobs are found by their ids: from their results, from what was saved of them, and from how they ended."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
import nats
import pytest
from nats.js import JetStreamContext

from gateway.timelines.jobs import JobTimelines
from gateway.timelines.view import view_of
from shared.batch_progress import BatchProgress
from shared.kept_results import JobEnd
from shared.messages import BatchResult
from shared.receipt import PrefillPart, Receipt
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import end_subject, progress_subject, result_subject

NOW = time.time()
RECEIPT = Receipt(taken=NOW - 8, admitted_s=1.0, scheduled_s=2.0, first_s=3.5, ended_s=8.0, device_s=4.0)
LINE = f"batch_{'0' * 32}-7"


@pytest.fixture
async def js(nats_url: str) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_url)
    await ensure_streams(client.jetstream(), StreamLimits())
    yield client.jetstream()
    await client.close()


def result(job_id: str, tenant: str = "acme & co", receipt: Receipt | None = RECEIPT, **fields: object) -> BatchResult:
    told = {"model": "m", "tenant": tenant, "text": "", "finish": "stop", "worker": "w", "completion_tokens": 5}
    return msgspec.convert(
        {"id": job_id, "created": NOW - 10, "completed": NOW, "receipt": receipt} | told | fields, BatchResult
    )


async def store(js: JetStreamContext, each: BatchResult) -> None:
    await js.publish(result_subject(each.tenant, each.id), msgspec.json.encode(each))


async def test_job_with_a_result_shows_its_wait_its_worker_and_what_it_took(js: JetStreamContext) -> None:
    await store(
        js, result("a.job", attempt=2, receipt=msgspec.structs.replace(RECEIPT, prefills=(PrefillPart(2, 1, 9),)))
    )
    (found,) = await JobTimelines(js).find("a.job")
    view = view_of(found, 3600.0)
    assert (found.tenant, found.outcome, found.num_generated) == ("acme & co", "completed", 5)
    assert [(event.text, event.at_s) for event in view.events] == [
        ("the job was published", 0.0),
        ("attempt 1, because the one before did not end it", 0.0),
        ("claimed by w", pytest.approx(2)),
        ("first step, 0 of 0 prompt tokens from the cache", pytest.approx(4)),
        ("prefilled 9 tokens", pytest.approx(5)),
        ("first token", pytest.approx(5.5)),
        ("attempt 1 ended after 5 tokens: stop", pytest.approx(10)),
        ("completed", pytest.approx(10)),
    ]
    assert (view.receipt.device_ms, view.receipt.cost) == (4000, pytest.approx(4))
    bars = [(bar.kind, bar.end_s - bar.begin_s) for row in view.rows for bar in row.bars]
    assert ("queue", pytest.approx(2)) in bars


async def test_line_of_a_batch_is_told_of_all_its_choices(js: JetStreamContext) -> None:
    for number, finish in enumerate(("stop", "failed", "length")):
        await store(js, result(f"{LINE}-{number}", finish=finish, error="no" if finish == "failed" else None))
    (found,) = await JobTimelines(js).find(LINE)
    assert ([life.id for life in found.sequences], found.completion_tokens) == ([f"{LINE}-{n}" for n in range(3)], 15)
    assert (found.id, found.outcome, found.error) == (LINE, "failed", "no")
    assert await JobTimelines(js).find(LINE[:-1] + "8") == []


async def test_result_of_the_version_before_and_of_a_job_that_never_ran_are_told(js: JetStreamContext) -> None:
    for tenant, attempt, worker in (("one", 1, "w"), ("two", 0, ""), ("three", 1, "")):
        told = {"attempt": attempt, "worker": worker, "finish": "cancelled", "completion_tokens": 0}
        await store(js, result("plain", tenant, None, **told))
    ran, waited, unnamed = await JobTimelines(js).find("plain")
    workers = [[attempt.worker for attempt in each.sequences[0].attempts] for each in (ran, waited, unnamed)]
    assert workers == [["w"], [], [None]]
    assert view_of(waited, None).events[-1].text == "cancelled"


async def test_job_that_runs_and_one_whose_result_has_gone_are_told_as_far_as_they_are_known(
    js: JetStreamContext,
) -> None:
    saved = BatchProgress(b"", 1, "r", 1, token_ids=(1, 2, 3))
    await js.publish(progress_subject("t", "runs"), msgspec.msgpack.encode(saved))
    await js.publish(end_subject("t", "gone"), msgspec.msgpack.encode(JobEnd("length", NOW)))
    (runs,) = await JobTimelines(js).find("runs")
    assert (runs.outcome, runs.num_generated) == ("running", 3)
    (gone,) = await JobTimelines(js).find("gone")
    assert (gone.outcome, gone.began, gone.error) == ("completed", NOW, "its result is no longer kept")
    for job_id in ("nothere", "", "x" * 200):
        assert await JobTimelines(js).find(job_id) == []


async def test_line_whose_choices_have_all_been_answered_is_completed(js: JetStreamContext) -> None:
    line = f"batch_{'1' * 32}-7"
    for number, finish in enumerate(("stop", "length")):
        await store(js, result(f"{line}-{number}", finish=finish))
    (found,) = await JobTimelines(js).find(line)
    assert (found.id, found.outcome, found.error, found.num_generated) == (line, "completed", None, 10)
