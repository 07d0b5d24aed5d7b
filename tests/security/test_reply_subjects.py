"""Incident class: forged reply subjects. A worker says nothing on a subject because a request names it."""

from __future__ import annotations

import msgspec
import pytest
from nats.aio.msg import Msg

from shared.batch_streams import batch_stream
from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import request_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, fresh_name

SHORT = Sampling(max_tokens=3, ignore_eos=True)
FORGED = [
    "$JS.API.STREAM.DELETE.HR_INTERACTIVE",
    "$JS.ACK.HR_INTERACTIVE.x.1.2.3.4.5",
    "$SYS.REQ.SERVER.PING",
    "hr.worker.m.w",
    "hr.gateway.g",
    "hr.cancel.m",
    "hr.req.m.interactive",
    "hr.result.other.r",
    "hr.tok.a.b",
    "hr.tok.",
    "hr.tok",
    "_INBOX.stolen",
    "x y",
]
# NATS would not take these as subjects at all; they would end the connection, or mean many subjects.
UNUSABLE = ["hr.tok.>", "hr.tok.*", "hr.tok.x\r\nPUB stolen 1\r\nz\r\n", "hr.tok.x\n", "", " ", "a..b", "x" * 513]


@pytest.mark.parametrize("lane", ["interactive", "batch"])
async def test_worker_says_nothing_on_a_forged_subject(worker: RunningWorker, gateway: TestGateway, lane: str) -> None:
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    for subject in FORGED:
        if " " not in subject and not subject.endswith("."):
            await gateway.nats.subscribe(subject, cb=hear)
    tenant = "acme"
    for subject in [*FORGED, *UNUSABLE]:
        fields = msgspec.to_builtins(gateway.request(sampling=SHORT, tenant=tenant, reply=subject))
        payload = msgspec.msgpack.encode({**fields, "type": "request", "lane": lane})
        await gateway.js.publish(request_subject(gateway.model, lane, tenant), payload)
        # Nor where the request cannot be read but for its sender.
        broken = msgspec.msgpack.encode({**fields, "id": fresh_name("b"), "type": "request", "sampling": 7})
        await gateway.js.publish(request_subject(gateway.model, lane, tenant), broken)
    stream = "HR_INTERACTIVE" if lane == "interactive" else batch_stream(tenant)
    await gateway.wait_until_acknowledged(stream)
    assert (await gateway.ask(sampling=SHORT)).finish.reason == "length"
    await gateway.nats.flush()
    # What our own publications cause is not the worker's.
    assert [subject for subject in heard if subject not in ("hr.req.m.interactive",)] == []
    assert not worker.worker.has_failed.is_set()


async def test_frames_go_to_the_gateway_that_asked(worker: RunningWorker, gateway: TestGateway) -> None:
    stolen: list[Msg] = []

    async def steal(message: Msg) -> None:
        stolen.append(message)

    await gateway.nats.subscribe("hr.tok.thief", cb=steal)
    answer = await gateway.ask(sampling=SHORT)
    await gateway.publish_raw(encode(gateway.request(id="r" * 64, sampling=SHORT)))
    assert answer.finish.reason == "length"
    await gateway.nats.flush()
    assert stolen == []
