from __future__ import annotations

import json
from types import SimpleNamespace
from typing import cast

import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NoStreamResponseError

from shared.batch_streams import batch_stream, batch_tenants
from shared.streams import StreamLimits, ensure_streams
from shared.subjects import request_subject


async def test_one_id_of_two_tenants_is_two_jobs_and_of_one_tenant_one(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(), ["a", "b"])
    acks = [
        await js.publish(request_subject("m", "batch", tenant), b"job", headers={"Nats-Msg-Id": "1"})
        for tenant in ("a", "b", "a")
    ]
    assert [(ack.stream, ack.seq, ack.duplicate) for ack in acks] == [
        ("HR_BATCH_a", 1, None),
        ("HR_BATCH_b", 1, None),
        ("HR_BATCH_a", 1, True),
    ]


@pytest.mark.parametrize("limits", [StreamLimits(tenant_max_bytes=2000), StreamLimits(tenant_max_msgs=3)])
async def test_tenant_that_fills_its_queue_fills_no_other(nats: Client, limits: StreamLimits) -> None:
    js = nats.jetstream()
    await ensure_streams(js, limits, ["loud", "quiet"])

    async def fill() -> None:
        for index in range(10):
            # Several models do not make the queue any larger.
            await js.publish(request_subject(f"m{index}", "batch", "loud"), b"x" * 500)

    with pytest.raises(APIError, match="maximum"):
        await fill()
    await js.publish(request_subject("m", "batch", "quiet"), b"x" * 500)


async def test_refused_expectations_tell_nothing_of_other_tenants(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(), ["a", "b"])
    for _ in range(5):
        await js.publish(request_subject("m", "batch", "a"), b"job", headers={"Nats-Msg-Id": "secret"})
    for header in ("Nats-Expected-Last-Msg-Id", "Nats-Expected-Last-Sequence"):
        with pytest.raises(APIError) as raised:
            await js.publish(request_subject("m", "batch", "b"), b"job", headers={header: "7"})
        assert "secret" not in str(raised.value)
        assert "5" not in str(raised.value.description)


async def test_jobs_of_nobody_are_not_stored(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(), ["t1"])
    for token in ("_74_31", "_741", "nobody"):
        with pytest.raises(NoStreamResponseError):
            await js.publish(f"hr.req.m.batch.{token}", b"job")


async def test_tenants_are_those_with_a_queue(nats: Client) -> None:
    js = nats.jetstream()
    assert await batch_tenants(nats, "m") == []
    await ensure_streams(js, StreamLimits(), ["b", "a c"])
    await js.add_stream(StreamConfig(name="HR_BATCH__74_31", subjects=["hr.req.x.batch._74_31"]))
    await js.add_stream(StreamConfig(name="OTHER", subjects=["hr.req.m.batch.other"]))
    assert await batch_tenants(nats, "m") == ["a c", "b"]
    assert await batch_tenants(nats, "x") == ["a c", "b"]


async def test_queue_that_exists_keeps_what_its_operator_configured(nats: Client) -> None:
    js = nats.jetstream()
    await ensure_streams(js, StreamLimits(tenant_max_msgs=7, tenant_max_wait_s=60), ["a"])
    await ensure_streams(js, StreamLimits(tenant_max_msgs=9), ["a"])
    config = (await js.stream_info(batch_stream("a"))).config
    assert (config.max_msgs, (config.metadata or {})["headrace_max_wait_s"]) == (7, "60")


class Pages:
    """Answers as NATS does, which tells 1024 streams at a time, with fewer."""

    streams = tuple(f"HR_BATCH_t{number}" for number in range(10))

    async def request(self, subject: str, payload: bytes, timeout: float) -> SimpleNamespace:
        offset = json.loads(payload)["offset"]
        page = {"total": len(self.streams), "offset": offset, "limit": 4, "streams": self.streams[offset : offset + 4]}
        return SimpleNamespace(data=json.dumps(page).encode())


async def test_tenants_of_all_pages_are_found() -> None:
    assert await batch_tenants(cast("Client", Pages()), "m") == [f"t{number}" for number in range(10)]
