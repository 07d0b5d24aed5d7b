"""Batch publishers have NATS accounts of their own: nothing they name reaches the main account or another tenant."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.errors import APIError, NotFoundError

from ops.cli.tenant import account_block
from ops.stack.servers import NATS_CONFIG
from shared.batch_streams import batch_stream
from shared.streams import INTERACTIVE_STREAM, RESULTS_STREAM, StreamLimits, ensure_streams
from tests.ops.cli.command import headrace
from tests.ops.nats.secured import OTHER_TENANT, OTHER_TOKEN, PASSWORDS, Connection, secured_server
from tests.servers import NatsServer, pull_subscription

Connect = Callable[..., Awaitable[Connection]]
BATCH_STREAM = batch_stream("default")
OTHER_USER = f"batch-{OTHER_TOKEN}"
FIRST_ONLY = {"Nats-Expected-Last-Subject-Sequence": "0"}
# What a reply subject or a delivery subject could do harm on in the main account.
TARGETS = (
    "hr.req.m.interactive", "hr.req.m.batch.victim", "hr.cancel.m", "hr.tok.g", "hr.result.victim.r", "hr.gateway.g",
    "hr.worker.m.w", "hr.dead.m.batch.victim", "_INBOX_gateway.x", "_INBOX_worker.x", "_INBOX_admin.x",
    "$JS.API.STREAM.PURGE.HR_INTERACTIVE", "$JS.API.STREAM.DELETE.HR_BATCH_default",
)  # fmt: skip


async def _num_messages(connection: Connection, stream: str) -> int:
    return (await connection.client.jetstream().stream_info(stream)).state.messages


async def test_job_is_queued_pulled_and_its_result_heard_once_and_read_back(as_role: Connect) -> None:
    batch, worker = await as_role("batch"), await as_role("worker")
    heard = await batch.client.subscribe("hr.result.default.*")
    ack = await batch.client.jetstream().publish("hr.req.readback.batch.default", b"job")
    assert ack.stream == BATCH_STREAM
    queue = worker.client.jetstream()
    subscription = await pull_subscription(queue, "readback", "batch")
    (message,) = await subscription.fetch(1, timeout=10)
    assert (message.subject, message.data) == ("hr.req.readback.batch.default", b"job")
    await queue.publish("hr.result.default.readback", b"first", headers=FIRST_ONLY)
    with pytest.raises(APIError, match="wrong last sequence"):
        await queue.publish("hr.result.default.readback", b"second", headers=FIRST_ONLY)
    await message.ack_sync(timeout=10)
    stored = await batch.client.jetstream().get_last_msg(RESULTS_STREAM, "hr.result.default.readback", direct=True)
    assert stored.data == b"first"
    live = await heard.next_msg(timeout=10)
    assert (live.subject, live.data) == ("hr.result.default.readback", b"first")
    await batch.client.flush()
    assert heard.pending_msgs == 0
    assert not await worker.is_refused()
    assert not await batch.is_refused()


async def test_any_client_reads_a_result_with_the_credentials_in_its_url_alone(
    secured_nats: NatsServer, as_role: Connect
) -> None:
    worker = await as_role("worker")
    await worker.client.jetstream().publish("hr.result.default.anyclient", b"done")
    client = await nats.connect(secured_nats.url.replace("//", f"//batch:{PASSWORDS['batch']}@"))
    reply = await client.request("$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.anyclient", timeout=10)
    assert reply.data == b"done"
    missing = await client.request("$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.nothing", timeout=10)
    assert (missing.data, (missing.headers or {})["Status"]) == (b"", "404")
    await client.close()


async def test_reply_to_a_subject_of_the_job_s_tenant_arrives(as_role: Connect) -> None:
    worker, batch, other = await as_role("worker"), await as_role("batch"), await as_role(OTHER_USER, "batch")
    mine = await batch.client.subscribe("hr.reply.default.here")
    await batch.client.flush()
    assert not await other.can_subscribe("hr.reply.default.here")
    await worker.client.publish("hr.reply.default.here", b"result")
    assert (await mine.next_msg(timeout=10)).data == b"result"


@pytest.mark.parametrize("target", TARGETS)
async def test_subject_named_as_reply_is_never_one_of_the_main_account(as_role: Connect, target: str) -> None:
    admin, batch = await as_role("admin"), await as_role("batch")
    reached: list[Msg] = []

    async def note(message: Msg) -> None:
        reached.append(message)

    # The administrator cannot listen here, so the roles that may listen do.
    for role in ("gateway", "worker"):
        listener = await as_role(role)
        if await listener.can_subscribe(target):
            await listener.client.subscribe(target, cb=note)
            await listener.client.flush()
    num_jobs = await _num_messages(admin, BATCH_STREAM)
    before = {stream: await _num_messages(admin, stream) for stream in (INTERACTIVE_STREAM, RESULTS_STREAM, "HR_DEAD")}
    for payload in (b"", b"job"):
        await batch.client.publish("hr.req.m.batch.default", payload, reply=target)
        await batch.client.publish("$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.r", payload, reply=target)
    await batch.client.flush()
    await asyncio.sleep(0.05)
    after = {stream: await _num_messages(admin, stream) for stream in before}
    assert (after, reached) == (before, [])
    # The jobs themselves went in, and nothing else did: no acknowledgement came back as a job.
    assert await _num_messages(admin, BATCH_STREAM) == num_jobs + 2


async def test_acknowledgements_of_interactive_messages_cannot_be_forged(as_role: Connect) -> None:
    gateway, worker, batch = await as_role("gateway"), await as_role("worker"), await as_role("batch")
    queue = worker.client.jetstream()
    subscription = await pull_subscription(queue, "forge", "interactive")
    await gateway.client.jetstream().publish("hr.req.forge.interactive", b"precious")
    (message,) = await subscription.fetch(1, timeout=10)
    for subject in ("hr.req.m.batch.default", "$JS.API.DIRECT.GET.HR_RESULTS.hr.result.default.none", message.reply):
        await batch.client.publish(subject, b"", reply=message.reply)
    await batch.client.flush()
    await asyncio.sleep(0.05)
    assert (await queue.consumer_info(INTERACTIVE_STREAM, "forge-interactive")).num_ack_pending == 1
    await message.ack_sync(timeout=10)


async def test_consumers_streams_and_information_of_the_main_account_are_out_of_reach(as_role: Connect) -> None:
    batch = await as_role("batch")
    create = {"stream_name": RESULTS_STREAM, "config": {"name": "p", "deliver_subject": "hr.cancel.m"}}
    for subject, body in (
        ("$JS.API.CONSUMER.CREATE.HR_RESULTS.p", create),
        ("$JS.API.STREAM.INFO.HR_BATCH_default", {"subjects_filter": ">"}),
        ("$JS.API.STREAM.MSG.GET.HR_RESULTS", {"seq": 1}),
        ("$JS.API.DIRECT.GET.HR_RESULTS", {"seq": 1}),
        ("$JS.API.DIRECT.GET.HR_RESULTS", {"multi_last": ["hr.result.*.*"]}),
    ):
        with pytest.raises((TimeoutError, NoRespondersError)):
            await batch.client.request(subject, json.dumps(body).encode(), timeout=0.2)
        assert await batch.is_refused()


@pytest.mark.parametrize("headers", [{"Nats-Rollup": "all"}, {"Nats-Schedule": "@every 1s"}, {"Nats-Incr": "+1"}])
async def test_headers_with_power_over_a_stream_are_refused(as_role: Connect, headers: dict[str, str]) -> None:
    batch, admin = await as_role("batch"), await as_role("admin")
    await batch.client.jetstream().publish("hr.req.headers.batch.default", b"1")
    num_before = await _num_messages(admin, BATCH_STREAM)
    with pytest.raises(APIError):
        await batch.client.jetstream().publish("hr.req.headers.batch.default", b"2", headers=headers)
    assert await _num_messages(admin, BATCH_STREAM) == num_before


async def test_message_trace_goes_nowhere_in_the_main_account(as_role: Connect) -> None:
    batch, worker = await as_role("batch"), await as_role("worker")
    heard = await worker.client.subscribe("hr.cancel.m")
    await worker.client.flush()
    await batch.client.publish("hr.req.m.batch.default", b"", headers={"Nats-Trace-Dest": "hr.cancel.m"})
    await batch.client.flush()
    await asyncio.sleep(0.05)
    assert heard.pending_msgs == 0


async def test_tenants_reach_only_their_own_jobs_and_results(as_role: Connect) -> None:
    worker, mine, other = await as_role("worker"), await as_role("batch"), await as_role(OTHER_USER, "batch")
    foreign = await mine.client.subscribe("_INBOX.>")
    await other.client.jetstream().publish(f"hr.req.m.batch.{OTHER_TOKEN}", b"job")
    await worker.client.jetstream().publish(f"hr.result.{OTHER_TOKEN}.private", b"secret")
    result = await other.client.jetstream().get_last_msg(
        RESULTS_STREAM, f"hr.result.{OTHER_TOKEN}.private", direct=True
    )
    assert result.data == b"secret"
    await mine.client.flush()
    assert foreign.pending_msgs == 0
    for subject in (
        f"hr.req.m.batch.{OTHER_TOKEN}",
        f"$JS.API.DIRECT.GET.HR_RESULTS.hr.result.{OTHER_TOKEN}.private",
        "hr.req.m.batch._64efault",
    ):
        assert not await mine.can_publish(subject)
    for subject in (f"hr.result.{OTHER_TOKEN}.private", "hr.result.*.private", f"hr.stored.{OTHER_TOKEN}.private"):
        assert not await mine.can_subscribe(subject)


async def test_gateway_and_worker_do_not_hear_what_a_tenant_publishes_in_its_own_account(as_role: Connect) -> None:
    mine, worker = await as_role("batch"), await as_role("worker")
    with pytest.raises(NotFoundError):
        await mine.client.jetstream().get_last_msg(RESULTS_STREAM, "hr.result.default.never", direct=True)
    heard = await worker.client.subscribe("hr.cancel.m")
    await worker.client.flush()
    assert not await mine.can_publish("hr.cancel.m")
    assert heard.pending_msgs == 0


def test_shipped_account_is_the_one_that_the_command_prints() -> None:
    shipped = (NATS_CONFIG.parent / "tenants.conf").read_text()
    login = "user: batch, password: $HEADRACE_NATS_BATCH_PASSWORD"
    assert "\n".join(line for line in shipped.splitlines() if not line.startswith("#")) + "\n" == account_block(
        "default", login
    )


def test_tenant_command_prints_an_account_with_a_password_of_its_own() -> None:
    printed = [headrace("tenant", OTHER_TENANT) for _ in range(2)]
    passwords = [
        re.search(r'user: "batch-acme_20corp_2e", password: "(p[0-9a-f]{32})"', done.stdout) for done in printed
    ]
    assert None not in passwords
    assert passwords[0][1] != passwords[1][1]  # type: ignore[index]
    assert printed[0].stdout.startswith(f"TENANT_{OTHER_TOKEN} {{\n")


def test_tenant_command_refuses_names_and_keys_that_cannot_be_used() -> None:
    for arguments in ([""], ["x" * 129], ["t", "--nkey", "SUAM"], ["t", "--nkey", 'U"} }' + "A" * 51]):
        done = headrace("tenant", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


async def test_added_tenant_is_served_after_a_reload_that_drops_no_connection(tmp_path: Path) -> None:
    with secured_server(tmp_path) as server:
        url = server.url.replace("//", f"//batch:{PASSWORDS['batch']}@")
        old = await nats.connect(url, allow_reconnect=False)
        with (tmp_path / "configuration" / "tenants.conf").open("a") as file:
            file.write(account_block("new", 'user: "batch-new", password: "passwordnew"'))
        # NATS 2.15 connects the imports of an account that a reload adds only at the next reload.
        for count in (1, 2):
            os.kill(server.pid, signal.SIGHUP)
            deadline = asyncio.get_running_loop().time() + 10
            while server.log.count("Reloaded server configuration") < count:
                assert asyncio.get_running_loop().time() < deadline, server.log[-2000:]
                await asyncio.sleep(0.05)
        admin = await nats.connect(server.url.replace("//", f"//admin:{PASSWORDS['admin']}@"), allow_reconnect=False)
        await ensure_streams(admin.jetstream(), StreamLimits(), ["new"])
        await admin.close()
        new = await nats.connect(server.url.replace("//", "//batch-new:passwordnew@"), allow_reconnect=False)
        assert (await new.jetstream().publish("hr.req.m.batch.new", b"job")).stream == "HR_BATCH_new"
        assert old.is_connected
        await old.flush()
        await old.close()
        await new.close()
