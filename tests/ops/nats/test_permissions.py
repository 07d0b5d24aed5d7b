"""The permissions in ops/nats/headrace.conf, tried on a real server: each role does its job and is refused the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from ops.stack.servers import NATS_ROLES
from shared.calls import call_process
from shared.errors import DependencyError
from shared.nats_connection import connect, inbox_prefix
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from tests.ops.nats.secured import Connection, connect_as, secured_server
from tests.servers import NatsServer, pull_subscription

Connect = Callable[[str], Awaitable[Connection]]
LIMITS = StreamLimits()


JOBS = {
    "gateway": {
        "publish": [
            "hr.req.m.interactive",
            "hr.cancel.m",
            "hr.tokenizer.m",
            "hr.gateway.g",
            "hr.probe.w",
            "hr.dead.m.interactive.t",
            "hr.response.t.r.0",
            "$JS.API.STREAM.MSG.GET.HR_RESPONSES",
            "$JS.API.STREAM.PURGE.HR_RESPONSES",
            "hr.batch.active.t.b",
            "hr.batch.ended.t.b",
            "$JS.API.STREAM.MSG.GET.HR_BATCHES",
            "$JS.API.STREAM.MSG.DELETE.HR_BATCHES",
            # Background responses are jobs of the batch lane.
            "hr.req.m.batch.t",
            "hr.req.m.background.t",
            "hr.result.t.r",
            "hr.end.t.r",
            "hr.kept.t",
            "$JS.API.STREAM.MSG.GET.HR_ENDS",
            "hr.progress.t.r",
            "$JS.API.STREAM.MSG.GET.HR_RESULTS",
            "$JS.API.STREAM.MSG.GET.HR_PROGRESS",
            "$JS.API.STREAM.MSG.DELETE.HR_BATCH_default",
            "$JS.API.CONSUMER.INFO.HR_BATCH_default.c",
            "hr.usage.t.m.interactive.requests",
            "hr.hours.t.m.interactive.requests-2026112923",
            "$JS.API.STREAM.MSG.GET.HR_USAGE",
            # Aliases, and the counts of canaries.
            "hr.alias",
            "hr.canary.c.g",
            "$JS.API.STREAM.MSG.GET.HR_ALIASES",
            "$JS.API.STREAM.CREATE.HR_ALIASES",
            # The log of resumable streams, and calls to those that generate them.
            "hr.stream.t.s.w.0",
            "hr.fence.w",
            "hr.owner.w",
            "hr.timeline.g",
            "$JS.API.STREAM.MSG.GET.HR_DEAD",
            "$JS.API.STREAM.MSG.GET.HR_STREAMS",
            "$JS.API.STREAM.PURGE.HR_STREAMS",
            "hr.media.t.d.0",
            "hr.model.h",
            "hr.adapter.w",
            "hr.name.t.n",
            "hr.name._.n",
            "$JS.API.STREAM.MSG.GET.HR_ADAPTERS",
        ],
        "subscribe": [
            "hr.tok.g",
            "hr.worker.*.*",
            "hr.gateway.*",
            "hr.progress.t.r",
            "hr.stored.t.r",
            "hr.owner.w",
            "hr.timeline.g",
            "hr.host.*",
            "hr.name.t.n",
            "_INBOX_gateway.x",
        ],
    },
    "worker": {
        "publish": [
            "hr.tok.g",
            "hr.worker.m.w",
            "hr.peer.m.w",
            "hr.result.t.r",
            "hr.end.t.r",
            "hr.kept.t",
            "$JS.API.STREAM.MSG.GET.HR_ENDS",
            "$JS.API.STREAM.MSG.GET.HR_MEDIA",
            # Tenants beyond their share lose their oldest results.
            "$JS.API.STREAM.PURGE.HR_RESULTS",
            "$JS.API.STREAM.PURGE.HR_ENDS",
            "hr.dead.m.batch.t",
            "hr.reply.t.x",
            "hr.usage.t.m.batch.requests",
            "hr.hours.t.m.batch.requests-2026112923",
            "hr.host.h",
        ],
        "subscribe": [
            "hr.worker.*.*",
            "hr.peer.m.w",
            "hr.cancel.m",
            "hr.tokenizer.m",
            "hr.probe.w",
            "hr.drain.w",
            "hr.model.h",
            "hr.adapter.w",
            "hr.gateway.*",
            "_INBOX_worker.x",
        ],
    },
    "batch": {
        "publish": ["hr.req.m.batch.default", "$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.r"],
        "subscribe": ["hr.result.default.r", "hr.result.default.*", "hr.reply.default.>", "_INBOX.x", "_INBOX_batch.x"],
    },
    "admin": {
        "publish": ["$JS.API.INFO", "hr.req.m.batch.t", "hr.drain.w", "hr.cancel.m", "hr.result.t.r", "hr.end.t.r"],
        "subscribe": ["hr.worker.*.*", "hr.gateway.*", "hr.host.*", "_INBOX_admin.x"],
    },
}
# Wildcards hide that two roles share these: dead letters and the API's information; the plain inbox belongs to tenants
# and, for clients without a prefix, to the administrator.
SHARED = {
    "hr.dead.m.interactive.t", "hr.dead.m.batch.t", "$JS.API.INFO", "_INBOX.x", "hr.req.m.batch.default",
    "hr.req.m.batch.t",
    # Gateways cancel abandoned requests, and administrators jobs.
    "hr.cancel.m",
    # Gateways read the results of background responses, and workers and tenants those of batch jobs.
    "hr.result.t.r", "hr.progress.t.r", "hr.end.t.r", "hr.kept.t", "$JS.API.STREAM.MSG.GET.HR_ENDS",
    # What names of adapters mean; gateways alone write it.
    "$JS.API.STREAM.MSG.GET.HR_ADAPTERS",
    "$JS.API.STREAM.MSG.GET.HR_PROGRESS", "$JS.API.STREAM.MSG.DELETE.HR_BATCH_default",
    "$JS.API.CONSUMER.INFO.HR_BATCH_default.c",
}  # fmt: skip
FORBIDDEN = {
    "gateway": {
        "publish": [
            "hr.tok.g", "hr.worker.m.w", "hr.peer.m.w", "$JS.API.STREAM.DELETE.HR_BATCH_default",
            "$JS.API.STREAM.PURGE.HR_INTERACTIVE",
            "$JS.ACK.HR_INTERACTIVE.x",
            "$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.c", "$SYS.REQ.SERVER.PING", "_INBOX_gateway.x",
            "$JS.API.STREAM.CREATE.HR_BATCH_default", "$JS.API.DIRECT.GET.HR_RESULTS.hr.result.t.r",
            "$JS.API.STREAM.MSG.GET.HR_BATCH_default", "$JS.API.STREAM.NAMES",
            "$JS.API.CONSUMER.CREATE.HR_DEAD.c", "hr.reply.t.x",
            "$JS.API.STREAM.MSG.DELETE.HR_RESULTS", "$JS.API.STREAM.MSG.DELETE.HR_DEAD",
            "$JS.API.STREAM.PURGE.HR_RESULTS", "$JS.API.STREAM.PURGE.HR_DEAD", "$JS.API.STREAM.DELETE.HR_RESPONSES",
            "$JS.API.CONSUMER.CREATE.HR_RESPONSES.c", "$JS.API.STREAM.MSG.DELETE.HR_RESPONSES",
            "$JS.API.STREAM.MSG.DELETE.HR_PROGRESS", "hr.stored.t.r", "$JS.API.STREAM.PURGE.HR_BATCH_default",
            "$JS.API.STREAM.PURGE.HR_ENDS", "$JS.API.STREAM.MSG.DELETE.HR_ENDS", "$JS.API.CONSUMER.CREATE.HR_ENDS.c",
            "$JS.API.STREAM.MSG.DELETE.HR_STREAMS", "$JS.API.CONSUMER.CREATE.HR_STREAMS.c",
            "$JS.API.STREAM.PURGE.HR_BATCHES", "$JS.API.CONSUMER.CREATE.HR_BATCHES.c",
            "$JS.API.STREAM.DELETE.HR_STREAMS", "$JS.API.STREAM.MSG.DELETE.HR_MEDIA",
            "$JS.API.STREAM.MSG.GET.HR_MEDIA", "$JS.API.STREAM.PURGE.HR_MEDIA", "$JS.API.CONSUMER.CREATE.HR_MEDIA.c",
            "$JS.API.STREAM.MSG.DELETE.HR_ADAPTERS", "$JS.API.STREAM.PURGE.HR_ADAPTERS",
        ],
        "subscribe": [
            "hr.stream.>", "hr.fence.>", "hr.media.>",
            "hr.req.>", "hr.response.>", "hr.batch.>", "hr.result.>", "hr.dead.>", "hr.cancel.m", "_INBOX_worker.>",
            "_INBOX.>",
            "$JS.ACK.>", ">",
        ],
    },
    "worker": {
        "publish": [
            "hr.req.m.interactive", "hr.req.m.batch.t", "hr.cancel.m", "hr.gateway.g", "_INBOX_gateway.x", "hr.model.h",
            "$JS.API.CONSUMER.CREATE.HR_RESPONSES.c", "$JS.API.CONSUMER.DURABLE.CREATE.HR_RESPONSES.c",
            "$JS.API.STREAM.DELETE.HR_BATCH_default", "$JS.API.STREAM.UPDATE.HR_INTERACTIVE",
            "$JS.API.STREAM.CREATE.HR_BATCH_default", "$JS.API.STREAM.MSG.GET.HR_INTERACTIVE",
            "$JS.API.STREAM.MSG.DELETE.HR_INTERACTIVE", "$JS.API.CONSUMER.INFO.HR_RESULTS.c", "$JS.API.STREAM.LIST",
            "$JS.API.CONSUMER.DURABLE.CREATE.HR_DEAD.c", "$JS.API.CONSUMER.MSG.NEXT.HR_DEAD.c",
            "$JS.API.CONSUMER.DELETE.HR_BATCH_default.c", "$JS.API.STREAM.MSG.DELETE.HR_RESULTS",
            "$JS.API.STREAM.MSG.GET.HR_RESULTS", "$JS.API.STREAM.MSG.GET.HR_DEAD", "$JS.API.STREAM.MSG.DELETE.HR_DEAD",
            "$JS.API.DIRECT.GET.HR_RESULTS.hr.result.t.r", "$JS.API.CONSUMER.CREATE.HR_RESULTS.c",
            "$JS.API.CONSUMER.CREATE.HR_DEAD.c", "$JS.API.CONSUMER.MSG.NEXT.HR_RESULTS.c", "_INBOX.x", "_INBOX_batch.x",
            "_INBOX_admin.x", "hr.stored.t.r", "hr.response.t.r.0", "$JS.API.STREAM.MSG.GET.HR_RESPONSES",
            "$JS.API.CONSUMER.CREATE.HR_ENDS.c.hr.end.t.r", "$JS.API.CONSUMER.MSG.NEXT.HR_ENDS.c",
            "$JS.API.STREAM.MSG.DELETE.HR_ENDS", "$JS.API.STREAM.PURGE.HR_BATCH_default",
            "$JS.API.STREAM.PURGE.HR_RESPONSES",
            "hr.stream.t.s.w.0", "hr.fence.w", "hr.owner.w", "$JS.API.STREAM.MSG.GET.HR_STREAMS",
            "$JS.API.STREAM.PURGE.HR_STREAMS", "$JS.API.CONSUMER.CREATE.HR_STREAMS.c",
            "hr.batch.active.t.b", "$JS.API.STREAM.MSG.GET.HR_BATCHES", "$JS.API.STREAM.MSG.DELETE.HR_BATCHES",
            "$JS.API.CONSUMER.CREATE.HR_BATCHES.c.hr.batch.active.t.b",
            "hr.media.t.d.0", "$JS.API.STREAM.MSG.DELETE.HR_MEDIA", "$JS.API.STREAM.PURGE.HR_MEDIA",
            "$JS.API.CONSUMER.CREATE.HR_MEDIA.c.hr.media.t.d.0", "$JS.API.CONSUMER.MSG.NEXT.HR_MEDIA.c",
            "hr.name._.n", "hr.name.t.n", "$JS.API.STREAM.MSG.DELETE.HR_ADAPTERS", "$JS.API.STREAM.PURGE.HR_ADAPTERS",
            "$JS.API.CONSUMER.CREATE.HR_ADAPTERS.c.hr.name.t.n",
        ],
        "subscribe": [
            "hr.stream.>", "hr.fence.>", "hr.owner.w", "hr.media.>", "hr.name.>",
            "hr.tok.>", "hr.req.>", "hr.result.>", "hr.dead.>", "_INBOX_gateway.>", "_INBOX.>", ">",
        ],
    },
    "batch": {
        "publish": [
            "hr.req.m.interactive", "hr.req.m.interactive.w", "hr.cancel.m", "hr.tok.g", "hr.result.t.r",
            "hr.end.default.r", "hr.kept.default",
            "hr.tokenizer.m", "hr.worker.m.w", "hr.peer.m.w", "hr.dead.m.batch.t", "hr.model.h", "hr.host.h",
            "$JS.API.STREAM.MSG.GET.HR_BATCH_default",
            "hr.batch.active.default.b", "hr.batch.ended.default.b", "$JS.API.STREAM.MSG.GET.HR_BATCHES",
            "hr.response.default.r.0", "$JS.API.STREAM.MSG.GET.HR_RESPONSES", "$JS.API.STREAM.PURGE.HR_RESPONSES",
            "hr.stream.default.s.w.0", "hr.fence.w", "hr.owner.w", "$JS.API.STREAM.MSG.GET.HR_STREAMS",
            "hr.media.default.d.0", "$JS.API.STREAM.MSG.GET.HR_MEDIA",
            "hr.name.default.n", "$JS.API.STREAM.MSG.GET.HR_ADAPTERS",
            "hr.req.m.batch.t", "hr.req.m.batch.*", "hr.reply.default.x", "hr.result.default.r", "hr.stored.default.r",
            "$JS.API.DIRECT.GET.HR_RESULTS.hr.result.t.r", "$JS.API.DIRECT.GET.HR_RESULTS", "$JS.API.INFO",
            "$JS.API.STREAM.INFO.HR_BATCH_default", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.MSG.GET.HR_RESULTS",
            "$JS.API.CONSUMER.CREATE.HR_RESULTS.c", "$JS.API.CONSUMER.MSG.NEXT.HR_RESULTS.c", "_INBOX_gateway.x",
            "$JS.API.CONSUMER.CREATE.HR_BATCH_default.c",
            "$JS.API.STREAM.MSG.DELETE.HR_RESULTS", "$JS.ACK.HR_BATCH_default.x", "$JS.API.STREAM.PURGE.HR_RESULTS",
        ],
        "subscribe": [
            "hr.tok.>", "hr.req.>", "hr.worker.>", "hr.peer.>", "hr.cancel.>", "hr.dead.>", "hr.result.>",
            "hr.result.*.*",
            "hr.result.t.r", "hr.stored.>", "hr.reply.>", "hr.reply.t.x", "_INBOX_gateway.>", "_INBOX_worker.>",
            "_INBOX_admin.>", "$JS.>", ">",
        ],
    },
    "admin": {
        "publish": [
            "hr.req.m.interactive", "hr.tok.g", "hr.dead.m.batch.t", "hr.worker.m.w", "hr.peer.m.w", "hr.progress.t.r",
        ],
        "subscribe": [
            "hr.req.>", "hr.peer.>", "hr.tok.>", "hr.result.>", "hr.dead.>", "hr.response.>", "_INBOX_gateway.>", ">",
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_role_may_do_its_job(as_role: Connect, role: str) -> None:
    connection = await as_role(role)
    refused = [s for s in JOBS[role]["publish"] if not await connection.can_publish(s)]
    refused += [s for s in JOBS[role]["subscribe"] if not await connection.can_subscribe(s)]
    assert refused == []


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_role_is_refused_everything_else(as_role: Connect, role: str) -> None:
    connection = await as_role(role)
    allowed = [s for s in FORBIDDEN[role]["publish"] if await connection.can_publish(s)]
    allowed += [s for s in FORBIDDEN[role]["subscribe"] if await connection.can_subscribe(s)]
    assert allowed == []


@pytest.mark.parametrize("role", NATS_ROLES)
async def test_role_is_refused_the_jobs_of_the_other_roles(as_role: Connect, role: str) -> None:
    connection = await as_role(role)
    jobs = [job for other, job in JOBS.items() if other != role]
    # The administrator may call the whole JetStream API; what it may read of others is in FORBIDDEN.
    publish = {s for job in jobs for s in job["publish"] if role != "admin" or not s.startswith("$JS.API.")}
    allowed = [s for s in sorted(publish - SHARED - set(JOBS[role]["publish"])) if await connection.can_publish(s)]
    subscribe = {s for job in jobs for s in job["subscribe"]} - SHARED - set(JOBS[role]["subscribe"])
    allowed += [s for s in sorted(subscribe) if await connection.can_subscribe(s)]
    assert allowed == []


async def test_interactive_request_travels_from_gateway_to_worker(as_role: Connect) -> None:
    gateway, worker = await as_role("gateway"), await as_role("worker")
    await ensure_streams(gateway.client.jetstream(), LIMITS)
    queue = worker.client.jetstream()
    subscription = await pull_subscription(queue, "travel", "interactive")
    kept = await gateway.client.jetstream().publish("hr.req.travel.interactive", b"kept")
    dropped = await gateway.client.jetstream().publish("hr.req.travel.interactive", b"dropped")
    await gateway.client.jetstream().delete_msg(INTERACTIVE_STREAM, dropped.seq)
    (message,) = await subscription.fetch(1, timeout=10)
    await message.in_progress()
    await message.ack_sync(timeout=10)
    assert (message.data, message.metadata.sequence.stream) == (b"kept", kept.seq)
    assert not await gateway.is_refused()
    assert not await worker.is_refused()


async def test_lost_interactive_stream_is_made_again_by_a_gateway_or_a_worker(tmp_path: Path) -> None:
    with secured_server(tmp_path) as server:
        admin, *roles = [await connect_as(server.url, role) for role in ("admin", "gateway", "worker")]
        await ensure_streams(admin.client.jetstream(), LIMITS)
        for connection in roles:
            await admin.client.jetstream().delete_stream(INTERACTIVE_STREAM)
            await ensure_streams(connection.client.jetstream(), LIMITS)
            assert await admin.client.jetstream().stream_info(INTERACTIVE_STREAM)
        for connection in (admin, *roles):
            await connection.client.close()


async def test_worker_answers_tokenizer_calls_though_it_may_not_publish_to_inboxes(as_role: Connect) -> None:
    gateway, worker = await as_role("gateway"), await as_role("worker")

    async def answer(message: Any) -> None:
        await message.respond(b"tokens")

    await worker.client.subscribe("hr.tokenizer.m", queue="tokenizers", cb=answer)
    await worker.client.flush()
    reply = await call_process(gateway.client, "hr.tokenizer.m", b"text", 10)
    assert reply.data == b"tokens"
    assert reply.subject.startswith(f"{inbox_prefix('gateway')}.answers.")


@pytest.mark.parametrize(("user", "heard"), [("worker", "hr.worker.m.w"), ("gateway", "hr.gateway.g")])
async def test_message_that_a_login_sends_itself_lets_it_publish_nowhere_else(
    as_role: Connect, user: str, heard: str
) -> None:
    """With `allow_responses` a login may publish to whatever a message that it hears names for its reply."""
    rogue = await as_role(user)
    messages = await rogue.client.subscribe(heard)
    for subject in ("$JS.API.STREAM.DELETE.HR_DEAD", "hr.drain.w", "_INBOX_gateway.x", "hr.stored.default.r"):
        await rogue.client.publish(heard, b"", reply=subject)
        assert (await messages.next_msg(timeout=10)).reply == subject
        assert not await rogue.can_publish(subject)


@pytest.mark.parametrize(("user", "password"), [("gateway", "wrong"), (None, None), ("root", "passwordadmin")])
async def test_unknown_user_or_wrong_password_is_refused(
    secured_nats: NatsServer, user: str | None, password: str | None
) -> None:
    with pytest.raises(DependencyError, match="refuses the user or password"):
        await connect(secured_nats.url, role="gateway", name="stranger", user=user, password=password)


async def test_server_tells_clients_the_payload_limit_of_the_configuration(as_role: Connect) -> None:
    assert (await as_role("gateway")).client.max_payload == 4 << 20


async def test_account_refuses_a_stream_beyond_its_storage(as_role: Connect) -> None:
    admin = await as_role("admin")
    too_large = StreamConfig(name="LARGE", subjects=["large"], max_bytes=8 << 30)
    with pytest.raises(APIError, match="insufficient storage"):
        await admin.client.jetstream().add_stream(too_large)


def test_server_opens_no_listener_but_the_client_port(secured_nats: NatsServer, tmp_path: Path) -> None:
    assert "Listening for client connections" in secured_nats.log
    for listener in ("websocket", "MQTT", "leafnode", "route", "http monitor"):
        assert f"Listening for {listener}".lower() not in secured_nats.log.lower()
