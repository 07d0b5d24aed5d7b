"""What a login has stored, JetStream delivers wherever a consumer or a reply names: no login may choose both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from ops.cli.tenant import user_block
from shared.consumers import ensure_consumer
from shared.streams import (
    DEAD_STREAM,
    INTERACTIVE_STREAM,
    PROGRESS_STREAM,
    RESPONSES_STREAM,
    RESULTS_STREAM,
    StreamLimits,
    ensure_streams,
)
from tests.ops.nats.secured import Connection, connect_as, secured_server
from tests.servers import NatsServer

TEXT = b"text of its own"
TARGET = "hr.cancel.m"
PURGE = f"$JS.API.STREAM.PURGE.{DEAD_STREAM}"
MODEL_LOGIN = "worker-m"
# One subject of each stream.
STORED = {
    PROGRESS_STREAM: "hr.progress.default.r",
    RESULTS_STREAM: "hr.result.default.r",
    DEAD_STREAM: "hr.dead.m.batch.default",
    RESPONSES_STREAM: "hr.response.default.r.0",
    "HR_BATCH_default": "hr.req.m.batch.default",
    INTERACTIVE_STREAM: "hr.req.m.interactive",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own: pulls of a login end with its streams, and are answered then."""
    with secured_server(tmp_path, user_block("m", f'user: "{MODEL_LOGIN}", password: "pw"')) as running:
        yield running


async def _connect(server: NatsServer, user: str) -> Connection:
    return await (
        connect_as(server.url, user, "worker", scope="m") if user == MODEL_LOGIN else connect_as(server.url, user)
    )


def _calls(stream: str, subject: str, target: str) -> Iterator[tuple[str, bytes, str]]:
    """Yield calls that may have the messages of a subject delivered to `target`: subject, payload and reply."""
    for filtered in (subject, "hr.req.m.batch.default", "hr.req.m.interactive", ">"):
        for deliver in ({"deliver_subject": target}, {}):
            for name in ("m-batch", "m-interactive", "rogue"):
                config = {
                    "name": name,
                    "durable_name": name,
                    "ack_policy": "none",
                    "filter_subject": filtered,
                    **deliver,
                }
                body = json.dumps({"stream_name": stream, "config": config}).encode()
                yield f"$JS.API.CONSUMER.CREATE.{stream}", body, "_reply"
                yield f"$JS.API.CONSUMER.CREATE.{stream}.{name}", body, "_reply"
                yield f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{filtered}", body, "_reply"
                yield f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{name}", body, "_reply"
                yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", b"100", target
    yield f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", target
    yield f"$JS.API.DIRECT.GET.{stream}", json.dumps({"last_by_subj": subject}).encode(), target
    yield f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps({"last_by_subj": subject}).encode(), target


@pytest.mark.parametrize("user", ["worker", MODEL_LOGIN, "gateway", "batch"])
async def test_no_login_has_text_of_its_own_delivered_where_it_may_not_publish(server: NatsServer, user: str) -> None:
    admin, worker, rogue = [await _connect(server, each) for each in ("admin", "worker", user)]
    streams = admin.client.jetstream()
    await ensure_streams(streams, StreamLimits(), ["default"])
    delivered: list[Msg] = []

    async def note(message: Msg) -> None:
        delivered.append(message)

    await worker.client.subscribe(TARGET, cb=note)
    await worker.client.flush()
    # One more message, which only a call on JetStream's API can remove.
    await worker.client.jetstream().publish("hr.dead.m.batch.kept", b"letter")
    for stream, subject in STORED.items():
        for target in (TARGET, PURGE):
            await rogue.client.publish(subject, TEXT)
            for call, payload, reply in _calls(stream, subject, target):
                await rogue.client.publish(call, payload, reply=reply)
            await rogue.client.publish(subject, TEXT)
            await rogue.client.flush()
    assert (await streams.stream_info(DEAD_STREAM)).state.messages
    await worker.client.flush()
    assert [(message.subject, message.data) for message in delivered if TEXT in message.data] == []
    assert await rogue.is_refused()
    for connection in (admin, worker, rogue):
        await connection.client.close()


@pytest.mark.parametrize("deliver_subject", [None, "$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.red-interactive"])
async def test_text_of_a_job_is_no_pull_of_another_models_requests(
    server: NatsServer, deliver_subject: str | None
) -> None:
    """A login for one model, in league with a publisher, has NATS deliver a "job" where workers of a model pull."""
    users = ("admin", "gateway", "worker", MODEL_LOGIN, "batch")
    connections = admin, gateway, worker, rogue, publisher = [await _connect(server, each) for each in users]
    await ensure_streams(admin.client.jetstream(), StreamLimits(), ["default"])
    js = worker.client.jetstream()
    honest = await ensure_consumer(js, "red", "interactive", StreamLimits())
    config = {"name": "m-batch", "durable_name": "m-batch", "filter_subject": "hr.req.m.batch.default"}
    config |= {"ack_policy": "explicit"} | ({"deliver_subject": deliver_subject} if deliver_subject else {})
    call = json.dumps({"stream_name": "HR_BATCH_default", "config": config}).encode()
    subject = "$JS.API.CONSUMER.CREATE.HR_BATCH_default.m-batch.hr.req.m.batch.default"
    assert "error" not in json.loads((await rogue.client.request(subject, call, timeout=10)).data)
    await publisher.client.jetstream().publish("hr.req.m.batch.default", b'{"batch":9,"expires":60000000000}')
    if not deliver_subject:
        target = "$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.red-interactive"
        await rogue.client.publish("$JS.API.CONSUMER.MSG.NEXT.HR_BATCH_default.m-batch", b"1", reply=target)
        await rogue.client.flush()
    async with asyncio.timeout(30):
        # The refusal acknowledges the job; a pull that is taken waits.
        while True:
            job = await js.consumer_info("HR_BATCH_default", "m-batch")
            red = await js.consumer_info(INTERACTIVE_STREAM, "red-interactive")
            if job.delivered.consumer_seq and (red.num_waiting or not job.num_ack_pending):
                break
    inbox = worker.client.new_inbox()
    arrived = await worker.client.subscribe(inbox)
    for number in range(4):
        await gateway.client.jetstream().publish("hr.req.red.interactive", b"%d" % number)
    pull = json.dumps({"batch": 4, "expires": 20_000_000_000, "group": honest.group}).encode()
    await worker.client.publish("$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.red-interactive", pull, reply=inbox)
    assert [(await arrived.next_msg(timeout=10)).data for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    for connection in connections:
        await connection.client.close()
