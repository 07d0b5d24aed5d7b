"""What gateways do with responses, as the role that the shipped configuration gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from gateway.responses.draft import ResponseDraft
from gateway.responses.job import BackgroundJob
from gateway.responses.job_queue import JobQueue, JobRef
from gateway.responses.log import ResponseLog, ResponseRecord
from shared.batch_progress import BatchProgress
from shared.direct_client import DirectClient
from shared.messages import Request
from shared.server_clock import ServerClock
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import progress_subject
from tests.ops.nats.secured import Connection

Connect = Callable[[str], Awaitable[Connection]]


async def test_gateway_may_do_all_that_responses_need(as_role: Connect) -> None:
    admin, gateway, worker = await as_role("admin"), await as_role("gateway"), await as_role("worker")
    await ensure_streams(admin.client.jetstream(), StreamLimits(), ["default"])
    direct = cast("DirectClient", gateway.client)
    log, jobs = ResponseLog(direct), JobQueue(direct, ServerClock())
    draft = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[])
    record = ResponseRecord("default", "m", draft, b"{}" * 20_000)
    await log.put(record)
    assert await log.get("default", draft.id) == record
    await log.delete("default", draft.id)
    assert await log.get("default", draft.id) is None
    request = Request(id=draft.id, model="m", lane="batch", text="x")
    watch = await jobs.watch("default", draft.id)
    stream_seq = await jobs.publish(request)
    job = BackgroundJob(stream_seq=stream_seq, deadline=time.time() + 60)
    ref = JobRef("default", "m", draft.id, job)
    assert await jobs.result(ref) is None
    assert not (await jobs.state(ref)).is_running
    recorded = BatchProgress(b"", stream_seq, "", 0, (), "text")
    await worker.client.jetstream().publish(progress_subject("default", draft.id), msgspec.msgpack.encode(recorded))
    await asyncio.wait_for(asyncio.shield(watch.changed), 30)
    assert watch.take(stream_seq) == recorded
    await jobs.cancel(ref)
    # That its result is stored is heard, too.
    await asyncio.wait_for(asyncio.shield(watch.changed), 30)
    assert watch.take(stream_seq) is None
    await jobs.unwatch(watch)
    result = await jobs.result(ref)
    assert result is not None
    assert result.finish == "cancelled"
    assert (await admin.client.jetstream().stream_info("HR_BATCH_default")).state.messages == 0
    await jobs.forget(ref)
    forgotten = await jobs.result(ref)
    assert forgotten is not None
    assert forgotten.completed == 0
    assert not await gateway.is_refused()
