"""What NATS publishes on a reply subject reaches no call of JetStream's API that an empty message would make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from ops.cli.tenant import user_block
from shared.batch_streams import batch_stream
from shared.consumers import ensure_consumer
from shared.streams import DEAD_STREAM, INTERACTIVE_STREAM, StreamLimits, ensure_streams
from tests.ops.nats.secured import Connection, connect_as, secured_server
from tests.servers import NatsServer

MODEL_LOGIN = "worker-m"
LOGIN = user_block("m", f'user: "{MODEL_LOGIN}", password: "pw"')
QUEUE = batch_stream("default")
CONSUMERS = {QUEUE: "m-batch", INTERACTIVE_STREAM: "m-interactive"}
DESTRUCTIVE = (
    *(f"STREAM.PURGE.{stream}" for stream in (DEAD_STREAM, QUEUE, "HR_ENDS")),
    f"STREAM.DELETE.{DEAD_STREAM}", f"CONSUMER.DELETE.{QUEUE}.m-batch",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with secured_server(tmp_path_factory.mktemp("replies"), LOGIN) as running:
        yield running


async def _connect(server: NatsServer, user: str) -> Connection:
    if user == MODEL_LOGIN:
        return await connect_as(server.url, user, "worker", scope="m")
    return await connect_as(server.url, user)


async def _prepare(streams: JetStreamContext, worker: Connection) -> None:
    """Make the streams, one consumer of each queue, a dead letter, and an end."""
    await ensure_streams(streams, StreamLimits(), ["default"])
    await ensure_consumer(streams, "m", "batch", StreamLimits(), "default")
    await ensure_consumer(streams, "m", "interactive", StreamLimits())
    for subject in ("hr.dead.m.batch.kept", "hr.end.default.kept"):
        await worker.client.jetstream().publish(subject, b"letter")


async def _state(streams: JetStreamContext) -> tuple[int, int, int, int]:
    dead, ends, queue = [await streams.stream_info(name) for name in (DEAD_STREAM, "HR_ENDS", QUEUE)]
    return dead.state.messages, ends.state.messages, queue.state.messages, queue.state.consumer_count


async def _name_as_reply(rogue: Connection, target: str) -> None:
    """Make calls that NATS answers, with `target` as the reply, and wait until it has answered them."""
    inbox = rogue.client.new_inbox()
    answers = await rogue.client.subscribe(inbox)
    for reply in (target, inbox):
        for stream, consumer in CONSUMERS.items():
            pull = json.dumps({"batch": 1, "no_wait": True}).encode()
            await rogue.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", pull, reply=reply)
        await rogue.client.publish("$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.none", b"", reply=reply)
        await rogue.client.publish("hr.result.default.r", b"{}", reply=reply)
        await rogue.client.publish("hr.response.default.r.0", b"{}", reply=reply)
        await rogue.client.publish("hr.req.other.batch.default", b"{}", reply=reply)
    await answers.next_msg(timeout=10)
    await rogue.client.flush()


@pytest.mark.parametrize("target", DESTRUCTIVE)
@pytest.mark.parametrize("user", ["worker", MODEL_LOGIN, "gateway", "batch"])
async def test_no_login_has_nats_make_a_call_that_destroys(server: NatsServer, user: str, target: str) -> None:
    admin, worker, rogue = [await _connect(server, each) for each in ("admin", "worker", user)]
    streams = admin.client.jetstream()
    await _prepare(streams, worker)
    num_dead, num_ends, num_jobs, num_consumers = await _state(streams)
    await _name_as_reply(rogue, f"$JS.API.{target}")
    # A call of the same kind, which waits in the same queue of the server.
    await streams.purge_stream("HR_RESPONSES")
    after = await _state(streams)
    # What a gateway or a tenant may publish is a job.
    assert after[:2] == (num_dead, num_ends)
    assert after[2] >= num_jobs
    assert after[3] == num_consumers
    for connection in (admin, worker, rogue):
        await connection.client.close()


@pytest.mark.parametrize("user", ["worker", MODEL_LOGIN, "gateway"])
async def test_name_by_which_calls_reach_jetstream_is_no_reply(server: NatsServer, user: str) -> None:
    """Nor does a consumer that pushes deliver there: it has no subscriber."""
    admin, worker, rogue = [await _connect(server, each) for each in ("admin", "worker", user)]
    streams = admin.client.jetstream()
    await _prepare(streams, worker)
    hidden = f"_R_.API.PURGE.{DEAD_STREAM}"
    await rogue.client.publish("hr.result.default.r", b"{}", reply=hidden)
    assert await rogue.is_refused()
    push = {"name": "m-batch", "ack_policy": "none", "filter_subject": "hr.req.m.batch.default"}
    call = {"stream_name": QUEUE, "config": push | {"deliver_subject": hidden, "idle_heartbeat": 200_000_000}}
    subject = f"$JS.API.CONSUMER.CREATE.{QUEUE}.m-batch.hr.req.m.batch.default"
    await rogue.client.publish(subject, json.dumps(call).encode())
    await admin.client.jetstream().publish("hr.req.m.batch.default", b"{}")
    await streams.purge_stream("HR_RESPONSES")
    assert (await streams.stream_info(DEAD_STREAM)).state.messages
    for connection in (admin, worker, rogue):
        await connection.client.close()


@pytest.mark.parametrize("user", ["worker", MODEL_LOGIN])
async def test_without_the_closed_calls_a_pull_purges(tmp_path: Path, user: str) -> None:
    """NATS checks no permission for a reply. Where a version does, the way round may go."""
    with secured_server(tmp_path, LOGIN, is_closed=False) as server:
        admin, worker, rogue = [await _connect(server, each) for each in ("admin", "worker", user)]
        streams = admin.client.jetstream()
        await _prepare(streams, worker)
        await _name_as_reply(rogue, f"$JS.API.STREAM.PURGE.{DEAD_STREAM}")
        async with asyncio.timeout(30):
            while (await _state(streams))[0]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for connection in (admin, worker, rogue):
            await connection.client.close()
