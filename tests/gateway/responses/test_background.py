"""Background responses through OpenAI's own client, with a worker of the batch lane that does as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import msgspec
import openai
import pytest
from openai.types.responses import Response

from gateway.admission.auth import Principal
from gateway.admission.caller import Caller
from gateway.api.large_bodies import LargeBodies
from gateway.errors import ApiError
from gateway.responses.background import submit_job
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.job import BackgroundJob
from gateway.responses.job_queue import _ASK_EVERY_S, _WORKER_ANSWERS_S, JobQueue, JobRef
from gateway.responses.log import ResponseLog
from gateway.responses.store import ResponseStore
from shared.direct_client import DirectClient
from shared.messages import Cancel, Request
from shared.server_clock import ServerClock
from tests.gateway.responses.batch_worker import BatchWorker, batch_worker
from tests.gateway.responses.test_endpoint import BrokenLog
from tests.gateway.resumable.stream_reader import Client
from tests.gateway.wire_worker import WireWorker

TEXT = "".join(f"word {number}, " for number in range(20))


@pytest.fixture
async def batch(worker: WireWorker, nats_url: str) -> AsyncIterator[BatchWorker]:
    async with batch_worker(nats_url, worker.model) as batch:
        yield batch


async def _queue(client: openai.AsyncOpenAI, batch: BatchWorker, **fields: Any) -> Response:
    response = await client.responses.create(**{"model": batch.model, "input": "hi", "background": True} | fields)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    return response


async def _status(client: openai.AsyncOpenAI, response: Response) -> str | None:
    return (await client.responses.retrieve(response.id)).status


async def test_background_response_goes_through_its_states(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    response = await _queue(client, batch, max_output_tokens=7, instructions="Count.")
    assert await _status(client, response) == "queued"
    job = await batch.take()
    assert (job.id, job.lane, job.sampling.max_tokens, job.is_followed) == (response.id, "batch", 7, False)
    assert job.is_background
    assert job.messages is not None
    assert [message.role for message in job.messages] == ["system", "user"]
    assert await _status(client, response) == "in_progress"
    await batch.end(job, TEXT)
    done = await client.responses.retrieve(response.id)
    assert (done.status, done.output_text, done.id) == ("completed", TEXT, response.id)
    assert done.completed_at is not None
    assert done.usage is not None
    assert done.usage.total_tokens == 7
    following = await _queue(client, batch, input="and?", previous_response_id=response.id)
    job = await batch.take()
    assert job.messages is not None
    assert [message.content for message in job.messages] == ["hi", TEXT, "and?"]
    assert following.previous_response_id == response.id


async def test_failure_and_end_by_length_are_told(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    failing, long = await _queue(client, batch), await _queue(client, batch)
    for finish, error in (("failed", "it broke"), ("length", None)):
        await batch.end(await batch.take(), "abc", finish, error)  # type: ignore[arg-type]
    failed = await client.responses.retrieve(failing.id)
    assert failed.error is not None
    assert (failed.status, failed.error.message, failed.output_text) == ("failed", "it broke", "abc")
    incomplete = await client.responses.retrieve(long.id)
    assert incomplete.incomplete_details is not None
    assert (incomplete.status, incomplete.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("recorded", ["", "all that"])
async def test_response_that_runs_is_cancelled_with_all_that_its_worker_has_generated(
    batch: BatchWorker, client: openai.AsyncOpenAI, recorded: str
) -> None:
    response = await _queue(client, batch)
    job = await batch.take()
    batch.generated[job.id] = "all that was generated"
    if recorded:
        await batch.progress(job, recorded)
    cancelled = await client.responses.cancel(response.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "all that was generated")
    assert cancelled.completed_at is None
    # A worker that has died is asked until it is given up.
    assert 1 <= len(batch.cancels) < _WORKER_ANSWERS_S / _ASK_EVERY_S


async def test_cancelled_response_of_a_silent_worker_keeps_what_was_recorded_and_leaves_the_queue(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    running, waiting = await _queue(client, batch), await _queue(client, batch)
    job = await batch.take()
    await batch.progress(job, "so far")
    for response in (running, waiting):
        assert (await client.responses.cancel(response.id)).status == "cancelled"
        assert (await client.responses.cancel(response.id)).status == "cancelled"
    assert (await client.responses.retrieve(running.id)).output_text == "so far"
    await batch.nats.flush()
    asked = [Cancel((each.id,), tenant="default") for each in (running, waiting)]
    assert [each for number, each in enumerate(batch.cancels) if each not in batch.cancels[:number]] == asked
    after = await _queue(client, batch)
    # The one that waited is never given to a worker.
    assert (await batch.take()).id == after.id


async def test_finished_response_is_not_cancelled(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    response = await _queue(client, batch)
    await batch.end(await batch.take(), "done")
    assert (await client.responses.cancel(response.id)).output_text == "done"


async def test_cancellation_that_comes_behind_the_end_changes_neither_result_nor_end(batch: BatchWorker) -> None:
    jobs = JobQueue(cast("DirectClient", batch.nats), ServerClock())
    request = Request(id="resp_ended", model=batch.model, tenant="default", lane="batch", text="x")
    job = BackgroundJob(stream_seq=await jobs.publish(request), deadline=1e12)
    ref = JobRef("default", batch.model, request.id, job)
    await batch.end(await batch.take(), "done")
    await jobs.cancel(ref)
    result, end = await jobs.result(ref), await jobs.kept.end_of("default", request.id)
    assert result is not None
    assert end is not None
    assert (result.text, result.finish, end.finish) == ("done", "stop", "stop")
    await batch.nats.flush()
    assert batch.cancels == []


async def test_response_that_cannot_be_stored_leaves_no_job(batch: BatchWorker) -> None:
    published: list[Request] = []

    class Jobs(JobQueue):
        async def publish(self, request: Request) -> int:
            published.append(request)
            return await super().publish(request)

    jobs = Jobs(cast("DirectClient", batch.nats), ServerClock())
    store = ResponseStore(cast("ResponseLog", BrokenLog()), jobs)
    body = msgspec.json.encode({"model": batch.model, "input": "x", "background": True})
    generation = await ResponsesEndpoint(store, LargeBodies()).generation(body, Principal("key", "default"))
    js = batch.nats.jetstream()
    num_before = (await js.stream_info("HR_BATCH_default")).state.messages
    with pytest.raises(ApiError) as refusal:
        await submit_job(store, generation, Caller("key", "default", [], body, weight=0.5))
    assert [(request.key, request.weight) for request in published] == [("key", 0.5)]
    assert (refusal.value.status, refusal.value.code) == (503, "response_log_unavailable")
    assert (await js.stream_info("HR_BATCH_default")).state.messages == num_before
    await batch.nats.flush()
    assert batch.cancels == [Cancel((generation.draft.id,), tenant="default")]


async def test_response_whose_output_is_no_longer_kept_is_gone_and_can_be_deleted(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    response = await _queue(client, batch)
    await batch.end(await batch.take(), "done")
    encoded = response.id.replace("_", "_5f")
    await batch.nats.jetstream().purge_stream("HR_RESULTS", subject=f"hr.result.default.{encoded}")
    asked: list[Callable[[], Awaitable[object]]] = [
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.retrieve(response.id, stream=True),
        lambda: client.responses.cancel(response.id),
        lambda: client.responses.create(model=batch.model, input="and?", previous_response_id=response.id),
    ]
    for ask in asked:
        with pytest.raises(
            openai.APIStatusError, match=rf"'{response.id}' ended \(stop\) at .* no longer kept"
        ) as gone:
            await ask()
        assert (gone.value.status_code, gone.value.code) == (410, "response_expired")
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_deleted_response_is_not_computed_and_leaves_no_result(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    done, waiting = await _queue(client, batch), await _queue(client, batch)
    await batch.end(await batch.take(), "secret")
    for response in (done, waiting):
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    found = await batch.nats.jetstream().get_last_msg("HR_RESULTS", f"hr.result.default.{done.id.replace('_', '_5f')}")
    assert b"secret" not in (found.data or b"")


async def test_stream_follows_the_job_and_is_told_again_from_every_event(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    stream = await client.responses.create(model=batch.model, input="hi", background=True, stream=True)

    async def work() -> None:
        job = await batch.take()
        await batch.progress(job, TEXT[:50])
        await asyncio.sleep(0.3)
        await batch.progress(job, TEXT[:101])
        await asyncio.sleep(0.3)
        await batch.end(job, TEXT)

    working = asyncio.create_task(work())
    live = [event async for event in stream]
    await working
    assert [event.sequence_number for event in live] == list(range(len(live)))
    assert [event.type for event in live[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert "".join(event.delta for event in live if event.type == "response.output_text.delta") == TEXT
    assert live[-1].type == "response.completed"
    assert live[-1].response.output_text == TEXT
    response_id = live[-1].response.id
    # After its last event nothing is left but the end.
    for after in (None, 0, 5, len(live) - 2, len(live) - 1):
        options: dict[str, Any] = {} if after is None else {"starting_after": after}
        again = await client.responses.retrieve(response_id, stream=True, **options)
        rest = live[0 if after is None else after + 1 :]
        assert [event.to_dict() async for event in again] == [event.to_dict() for event in rest]


async def test_a_background_response_is_a_stream_like_any_other(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    """An `EventSource` goes on by the ids alone, and comes back no more once it has all."""
    response = await _queue(client, batch, stream=False)
    await batch.end(await batch.take(), TEXT)
    told = await client.responses.retrieve(response.id, stream=True)
    events = [event.to_dict() async for event in told]
    streams = Client(str(client.base_url).removesuffix("/v1/"), client.api_key)
    for after in (None, 0, 4, len(events) - 2):
        names = {} if after is None else {"Last_Event_ID": str(after)}
        async with streams.resumed(response.id, **names) as reading:
            await reading.read()
        assert list(reading.events) == list(range(0 if after is None else after + 1, len(events)))
        assert reading.objects == events[0 if after is None else after + 1 :]
    async with streams.resumed(response.id, f"?from={len(events)}") as reading:
        assert reading.response.status_code == 204
    assert (await streams.ask("HEAD", f"/v1/streams/{response.id}"))[0] == 200
    assert await streams.ask("DELETE", f"/v1/streams/{response.id}") == (
        200,
        {"id": response.id, "object": "stream", "deleted": True},
    )
    for method in ("GET", "DELETE"):
        status, body = await streams.ask(method, f"/v1/streams/{response.id}")
        assert (status, body["error"]["code"]) == (404, "response_not_found")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_what_cannot_be_done_in_the_background_is_refused_by_name(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    for fields, param in (({"store": False}, "store"), ({"top_logprobs": 2}, "top_logprobs")):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(model=batch.model, input="hi", background=True, **fields)  # type: ignore[call-overload]
        assert refusal.value.param == param
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.responses.create(model="no-such-model", input="hi", background=True)


async def test_number_of_an_event_without_a_stream_is_refused(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    response = await _queue(client, batch)
    for query in ({"starting_after": "3"}, {"starting_after": "3", "stream": "false"}):
        with pytest.raises(openai.BadRequestError, match="stream=true") as refusal:
            await client.responses.retrieve(response.id, extra_query=query)
        assert refusal.value.param == "starting_after"


async def test_number_of_an_event_is_taken_up_to_what_the_error_says(
    batch: BatchWorker, client: openai.AsyncOpenAI
) -> None:
    response = await _queue(client, batch)
    for refused in (10**9 + 1, -1):
        with pytest.raises(openai.BadRequestError, match="whole number from 0 to 1000000000"):
            await client.responses.retrieve(response.id, stream=True, starting_after=refused)
    # Of a response that goes on, the stream would say nothing for ten seconds.
    await batch.end(await batch.take(), TEXT)
    stream = await client.responses.retrieve(response.id, stream=True, starting_after=10**9)
    await stream.close()


async def test_cancellation_ends_the_stream_with_what_there_was(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model=batch.model, input="hi", background=True, stream=True)
    job = await batch.take()
    assert job.is_followed
    await batch.progress(job, TEXT[:50])
    events = []
    async for event in stream:
        events.append(event)
        is_text = event.type == "response.output_text.delta"
        if is_text and sum(event.type == "response.output_text.delta" for event in events) == 1:
            await client.responses.cancel(job.id)
    last = events[-1]
    # OpenAI's API has no event of its own for it; its clients end with this one.
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error, last.response.output_text) == ("cancelled", None, TEXT[:50])
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ({"starting_afer": "3"}, "starting_afer", "unknown_parameter"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"include[]": "everything"}, "include", "invalid_value"),
        ({"include": "reasoning.encrypted_content"}, "include", "invalid_value"),
    ],
)
async def test_query_that_would_change_nothing_is_refused(
    batch: BatchWorker, client: openai.AsyncOpenAI, query: dict[str, str], param: str, code: str
) -> None:
    response = await _queue(client, batch)
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.retrieve(response.id, extra_query=query)
    assert (refusal.value.param, refusal.value.code) == (param, code)


async def test_what_was_included_may_be_named_again(batch: BatchWorker, client: openai.AsyncOpenAI) -> None:
    response = await _queue(client, batch, include=["reasoning.encrypted_content"])
    again = await client.responses.retrieve(
        response.id, include=["reasoning.encrypted_content", "file_search_call.results"], include_obfuscation=False
    )
    assert again.id == response.id
