"""What gateways do with responses, as the role that the shipped configuration gives them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from gateway.responses.draft import ResponseDraft
from gateway.responses.job import BackgroundJob
from gateway.responses.job_queue import JobQueue, JobRef
from gateway.responses.log import ResponseLog
from gateway.responses.record import ResponseRecord
from shared.messages import Request
from shared.streams import StreamLimits, ensure_streams
from tests.ops.nats.secured import Connection

Connect = Callable[[str], Awaitable[Connection]]


async def test_gateway_may_do_all_that_responses_need(as_role: Connect) -> None:
    admin, gateway = await as_role("admin"), await as_role("gateway")
    await ensure_streams(admin.client.jetstream(), StreamLimits(), ["default"])
    log, jobs = ResponseLog(gateway.client), JobQueue(gateway.client)  # type: ignore[arg-type]
    draft = ResponseDraft(id="resp_" + 32 * "0", created_at=1, parameters=b"{}", input=[])
    record = ResponseRecord("default", "m", draft, b"{}" * 20_000)
    await log.put(record)
    assert await log.get("default", draft.id) == record
    await log.delete("default", draft.id)
    assert await log.get("default", draft.id) is None
    request = Request(id=draft.id, model="m", lane="batch", text="x")
    job = BackgroundJob(stream_seq=await jobs.publish(request), deadline=time.time() + 60)
    ref = JobRef("default", "m", draft.id, job)
    assert await jobs.result(ref) is None
    assert not (await jobs.state(ref)).is_running
    await jobs.cancel(ref)
    result = await jobs.result(ref)
    assert result is not None
    assert result.finish == "cancelled"
    assert (await admin.client.jetstream().stream_info("HR_BATCH_default")).state.messages == 0
    await jobs.forget(ref)
    forgotten = await jobs.result(ref)
    assert forgotten is not None
    assert forgotten.completed == 0
    assert not await gateway.is_refused()
