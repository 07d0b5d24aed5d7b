"""Incident class: one tenant's stored results push out those of others, or let a finished job run again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from nats.js.errors import NotFoundError

from shared.kept_results import JOB_ENDED
from shared.messages import BatchResult, Request, encode
from shared.nats_connection import connect
from shared.sampling import Sampling
from shared.streams import RESULTS_STREAM, StreamLimits, ensure_streams
from shared.subjects import request_subject, result_subject
from tests.gpu_worker.consumer.harness import TestGateway, start_worker, wait_until
from tests.servers import NatsServer

LIMITS = StreamLimits(results_max_bytes=1 << 18)
ATTACKER, VICTIM = "attacker", "victim"
NUM_JOBS = 450
LONG = "value = items[0]; " * 60


@pytest.fixture
async def small(start_nats: Callable[..., NatsServer]) -> AsyncIterator[TestGateway]:
    """A system whose stream of results holds 256 kB, with one worker."""
    url = start_nats().url
    client = await connect(url, role="admin", name="test")
    gateway = TestGateway(client, "m")
    await ensure_streams(gateway.js, LIMITS, [ATTACKER, VICTIM])
    worker = await start_worker(url, "m", LIMITS)
    yield gateway
    await worker.close()
    await client.close()


async def _publish(gateway: TestGateway, tenant: str, name: str, text: str = "x = ", **fields: bool) -> Request:
    job = gateway.request(
        text, id=name, tenant=tenant, lane="batch", reply=None, sampling=Sampling(max_tokens=1), **fields
    )
    await gateway.js.publish(request_subject("m", "batch", tenant), encode(job))
    return job


async def _result(gateway: TestGateway, tenant: str, name: str) -> BatchResult | None:
    try:
        message = await gateway.js.get_last_msg(RESULTS_STREAM, result_subject(tenant, name))
    except NotFoundError:
        return None
    return msgspec.json.decode(message.data or b"", type=BatchResult)


async def _wait_for(gateway: TestGateway, tenant: str, name: str) -> BatchResult:
    async def is_there() -> bool:
        return await _result(gateway, tenant, name) is not None

    await wait_until(is_there, 60)
    result = await _result(gateway, tenant, name)
    assert result is not None
    return result


async def test_echo_jobs_of_one_tenant_push_out_its_own_results_alone(small: TestGateway) -> None:
    await _publish(small, VICTIM, "kept")
    kept = await _wait_for(small, VICTIM, "kept")
    for number in range(NUM_JOBS):
        await _publish(small, ATTACKER, f"echo{number}", LONG, echo=True)
    await _wait_for(small, ATTACKER, f"echo{NUM_JOBS - 1}")
    await small.wait_until_acknowledged(f"HR_BATCH_{ATTACKER}")
    assert await _result(small, VICTIM, "kept") == kept
    assert await _result(small, ATTACKER, "echo0") is None
    # What has ended is not run again, although nothing of its result is left.
    await _publish(small, ATTACKER, "echo0", LONG, echo=True)
    again = await _wait_for(small, ATTACKER, "echo0")
    assert (again.finish, again.error_code, again.error_param, again.completion_tokens) == (
        "failed",
        JOB_ENDED,
        "id",
        0,
    )
    assert again.error is not None
    assert "ended before (length" in again.error
    # And what has its result keeps it.
    await _publish(small, VICTIM, "kept")
    await small.wait_until_acknowledged(f"HR_BATCH_{VICTIM}")
    assert await _result(small, VICTIM, "kept") == kept
