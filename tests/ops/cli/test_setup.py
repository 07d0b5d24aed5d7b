from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from ops.cli.running_system import AdminAccess, admin_client
from ops.cli.tenant import NatsUserConfig, account_block, login
from ops.stack import console
from ops.stack.servers import (
    NATS_CONFIG,
    NATS_ROLES,
    add_account,
    nats_password_variable,
    prepare,
    tenant_login,
)
from shared.errors import DependencyError
from tests.integration.system import System
from tests.ops.cli.command import headrace
from tests.ops.cli.jobs import publish
from tests.servers import NatsServer

STREAMS = {
    *("HR_INTERACTIVE", "HR_BATCH_default", "HR_RESULTS", "HR_DEAD", "HR_PROGRESS", "HR_RESPONSES", "HR_BATCHES"),
    *("HR_ENDS", "HR_HOURS", "HR_USAGE", "HR_STREAMS", "HR_MEDIA", "HR_ALIASES", "HR_ADAPTERS"),
}


async def test_setup_creates_the_streams_and_may_be_repeated(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    for _ in range(2):
        done = headrace("setup", "--nats-url", server.url)
        assert (done.returncode, done.stderr) == (0, "")
    client = await nats.connect(server.url)
    assert {stream.config.name for stream in await client.jetstream().streams_info()} == STREAMS
    await client.close()


async def test_tenants_get_queues_with_their_own_limits_and_keep_them(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    limits = ["--tenant-max-bytes", "2000000", "--tenant-max-msgs", "7", "--tenant-max-wait-s", "60"]
    assert headrace("setup", "--nats-url", server.url, "--tenants", "a, b c", *limits).returncode == 0
    done = headrace("setup", "--nats-url", server.url, "--tenants", "a,default", "--tenant-max-msgs", "9")
    assert done.stdout.strip().endswith("HR_BATCH_a, HR_BATCH_default")
    client = await nats.connect(server.url)
    found = {stream.config.name: stream.config for stream in await client.jetstream().streams_info()}
    assert STREAMS | {"HR_BATCH_a", "HR_BATCH_b_20c"} == set(found)
    config = found["HR_BATCH_a"]
    subjects = ["hr.req.*.batch.a", "hr.req.*.background.a"]
    assert (config.max_bytes, config.max_msgs, config.subjects) == (2_000_000, 7, subjects)
    assert (config.metadata or {})["headrace_max_wait_s"] == "60"
    assert found["HR_BATCH_default"].max_msgs == 9
    await client.close()


async def test_setup_brings_streams_of_an_earlier_version_up_to_date(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    client = await nats.connect(server.url)
    js = client.jetstream()
    await js.add_stream(name="HR_RESULTS", subjects=["hr.result.*.*"], max_msgs_per_subject=1, max_bytes=12345678)
    await js.publish("hr.result.default.kept", b"old")
    queue = StreamConfig(name="HR_BATCH_default", subjects=["hr.req.*.batch.default"], max_msgs=5)
    await js.add_stream(queue.evolve(retention=RetentionPolicy.WORK_QUEUE))
    await js.publish("hr.req.m.batch.default", b"waits")
    assert headrace("setup", "--nats-url", server.url).returncode == 0
    heard = await client.subscribe("hr.stored.*.*")
    await js.publish("hr.result.default.new", b"new")
    assert (await heard.next_msg(timeout=10)).subject == "hr.stored.default.new"
    assert (await js.get_last_msg("HR_RESULTS", "hr.result.default.kept", direct=True)).data == b"old"
    assert (await js.stream_info("HR_RESULTS")).config.max_bytes == 12345678
    info = await js.stream_info("HR_BATCH_default")
    assert info.config.subjects == ["hr.req.*.batch.default", "hr.req.*.background.default"]
    assert (info.config.max_msgs, info.state.messages) == (5, 1)
    await client.close()


def test_setup_and_dead_by_a_role_that_may_not_is_one_line_that_names_the_user(
    start_nats: Callable[..., NatsServer], monkeypatch
) -> None:
    for role in NATS_ROLES:
        monkeypatch.setenv(nats_password_variable(role), f"password{role}")
    server = start_nats("-c", str(NATS_CONFIG))
    login = ["--nats-url", server.url, "--nats-user", "batch", "--nats-password", "passwordbatch"]
    for command in (["setup", *login], ["dead", *login, "list"]):
        done = headrace(*command)
        assert (done.returncode, done.stdout) == (2, "")
        (message,) = done.stderr.splitlines()
        assert "lets this login in, but not do what the role admin does" in message
        assert "log in as the user `admin` of ops/nats/headrace.conf" in message
        assert "check --nats-user and --nats-url" in message


def test_setup_is_in_the_audit_log_without_the_password(start_nats: Callable[..., NatsServer]) -> None:
    url = start_nats().url.replace("nats://", "nats://ann:secret@")
    done = headrace("setup", "--nats-url", url, "--audit-file", "-")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("{")]
    entry = json.loads(line)
    assert (entry["action"], entry["outcome"], entry["who"]["nats_user"]) == ("setup", "done", "ann")
    assert entry["what"]["tenants"] == "default"
    assert "secret" not in line


def test_tenant_added_beside_a_running_system_publishes_its_jobs(state_dir: Path, cli_system: System) -> None:
    before = {file.name: file.read_text() for file in NATS_CONFIG.parent.glob("*.conf")}
    done = headrace("setup", "--state-dir", str(state_dir), "--tenants", "default, acme & co")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"accounts ready: acme & co; their logins are in {state_dir}/nats-conf/more-tenants.conf" in done.stdout
    (result,) = publish(state_dir, {"text": "x", "sampling": {"max_tokens": 2}}, tenant="acme & co", wait=True)
    assert result["tenant"] == "acme & co"
    # Earlier logins still work, and running it again changes nothing.
    (result,) = publish(state_dir, {"text": "x", "sampling": {"max_tokens": 2}}, wait=True)
    assert result["tenant"] == "default"
    done = headrace("setup", "--state-dir", str(state_dir), "--tenants", "acme & co")
    assert "accounts ready" not in done.stdout
    assert {file.name: file.read_text() for file in NATS_CONFIG.parent.glob("*.conf")} == before


def test_audit_log_of_an_administrator_lies_in_the_state_directory(
    state_dir: Path, cli_system: System, tmp_path: Path
) -> None:
    place = ["--state-dir", str(state_dir)]
    commands = (["setup", *place], ["drain", *place, "none"], ["batch", *place, "cancel", "none"])
    for command in commands:
        headrace(*command, cwd=tmp_path, HEADRACE_AUDIT_FILE="")
    actions = [json.loads(line)["action"] for line in (state_dir / "audit.jsonl").read_text().splitlines()]
    assert {"setup", "worker.drain", "batch.cancel"} <= set(actions)
    assert list(tmp_path.iterdir()) == []


def test_tenants_stay_when_the_system_is_started_anew(tmp_path: Path) -> None:
    prepare(tmp_path)
    add_account(tmp_path, account_block("acme", login(NatsUserConfig(), "batch-acme")))
    kept = tenant_login(tmp_path, "acme")
    configuration = prepare(tmp_path)
    assert kept is not None
    assert tenant_login(tmp_path, "acme") == kept
    assert tenant_login(tmp_path, "default") is None
    shown = {file.name: file.stat().st_mode & 0o077 for file in configuration.parent.glob("*tenants.conf")}
    assert shown == {"tenants.conf": 0, "more-tenants.conf": 0}


def test_wait_for_nats_that_does_not_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET_S", 0.05)

    async def connect() -> None:
        async with admin_client("nats://admin:secret@127.0.0.1:1", "test", AdminAccess(), 0.4):
            raise AssertionError("nothing listens there")

    with pytest.raises(DependencyError):
        asyncio.run(connect())
    assert capsys.readouterr().err == "headrace: waiting up to 0.4 s for NATS at 127.0.0.1:1\n"
