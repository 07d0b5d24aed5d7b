"""Logins for the workers of one model (`headrace worker-login`), on a real server: each serves its own model alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from nats.aio.client import Client

from ops.cli.tenant import user_block, worker_login
from ops.doctor.finding import Finding, Level
from ops.doctor.nats import NatsLogin, nats_findings
from ops.stack.config import DEMO_MODEL
from ops.stack.ports import free_port
from shared.batch_streams import batch_tenants
from shared.consumers import ensure_consumer
from shared.errors import DependencyError
from shared.nats_connection import WrongRoleError, connect
from shared.nats_files import NatsFiles
from shared.streams import INTERACTIVE_STREAM, StreamLimits, ensure_streams
from shared.subjects import encode_name, request_subject, served_by
from tests.ops.cli.command import headrace
from tests.ops.nats.secured import PASSWORDS, Connection, connect_as, secured_server
from tests.ops.nats.test_permissions import FORBIDDEN
from tests.servers import NatsServer, pull_subscription

# The second has a name whose encoding has more than letters.
OWN, OTHER = "m", "org/n.1"
OTHER_TOKEN = encode_name(OTHER)
LIMITS = StreamLimits()
AsWorker = Callable[[str], Awaitable[Connection]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [user_block(model, f'user: "w-{encode_name(model)}", password: "pw"') for model in (OWN, OTHER)]
    users += [user_block(OWN, f'user: "{name}", password: "pw"', "one.1") for name in ("w-m-one.1", "worker-m.one_2e1")]
    with secured_server(tmp_path_factory.mktemp("logins"), "".join(users)) as running:
        yield running


@pytest.fixture
async def as_worker(server: NatsServer) -> AsyncIterator[AsWorker]:
    opened: list[Client] = []

    async def open_as(model: str) -> Connection:
        token = encode_name(model)
        connection = await connect_as(server.url, f"w-{token}", "worker", scope=token)
        opened.append(connection.client)
        return connection

    admin = (await connect_as(server.url, "admin")).client
    opened.append(admin)
    await ensure_streams(admin.jetstream(), LIMITS, ["default"])
    yield open_as
    for client in opened:
        await client.close()


async def test_worker_does_what_its_model_needs(as_worker: AsWorker, server: NatsServer) -> None:
    for model in (OWN, OTHER):
        worker, token = await as_worker(model), encode_name(model)
        publish = [
            f"hr.worker.{token}.w",
            f"hr.peer.{token}.w",
            "hr.tok.g",
            "hr.result.t.r",
            f"hr.dead.{token}.batch.t",
        ]
        subscribe = [
            f"hr.worker.{token}.*",
            f"hr.peer.{token}.w",
            f"hr.cancel.{token}",
            f"hr.tokenizer.{token}",
            "hr.probe.w",
            "hr.drain.w",
        ]
        assert [s for s in publish if not await worker.can_publish(s)] == []
        assert [s for s in (*subscribe, "hr.gateway.*") if not await worker.can_subscribe(s)] == []
        js = worker.client.jetstream()
        assert await batch_tenants(worker.client, model) == ["default"]
        for lane in ("interactive", "resumed", "ready", "batch", "background"):
            await ensure_consumer(js, model, lane, LIMITS)  # type: ignore[arg-type]
            subscription = await pull_subscription(js, model, lane)  # type: ignore[arg-type]
            gateway = (await connect_as(server.url, "gateway")).client
            await gateway.jetstream().publish(request_subject(model, lane, "default"), b"job")  # type: ignore[arg-type]
            (message,) = await subscription.fetch(1, timeout=10)
            assert message.data == b"job"
            await message.ack_sync(timeout=10)
            await gateway.close()
        assert not await worker.is_refused()


async def test_worker_reaches_nothing_of_another_model_or_role(as_worker: AsWorker) -> None:
    other = OTHER_TOKEN
    publish = [
        f"hr.worker.{other}.w", f"hr.peer.{other}.w", f"hr.dead.{other}.batch.t",
        f"$JS.API.CONSUMER.CREATE.HR_INTERACTIVE.{other}-interactive.hr.req.{other}.interactive",
        f"$JS.API.CONSUMER.CREATE.HR_INTERACTIVE.m-interactive.hr.req.{other}.interactive",
        f"$JS.API.CONSUMER.CREATE.HR_INTERACTIVE.m-resumed.hr.req.{other}.resumed",
        f"$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.{other}-resumed",
        f"$JS.API.CONSUMER.CREATE.HR_INTERACTIVE.m-ready.hr.req.{other}_ready.resumed",
        f"$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.{other}-ready",
        "$JS.API.CONSUMER.CREATE.HR_INTERACTIVE.m-interactive", "$JS.API.CONSUMER.CREATE.HR_INTERACTIVE",
        "$JS.API.CONSUMER.DURABLE.CREATE.HR_INTERACTIVE.m-interactive",
        f"$JS.API.CONSUMER.MSG.NEXT.HR_INTERACTIVE.{other}-interactive",
        f"$JS.API.CONSUMER.INFO.HR_BATCH_default.{other}-batch",
        f"$JS.API.CONSUMER.CREATE.HR_BATCH_default.m-background.hr.req.{other}.background.default",
        f"$JS.API.CONSUMER.MSG.NEXT.HR_BATCH_default.{other}-background",
        f"$JS.ACK.HR_BATCH_default.{other}-background.1.1.1.1.0",
        f"$JS.ACK.HR_INTERACTIVE.{other}-interactive.1.1.1.1.0", f"$JS.ACK.HR_BATCH_default.{other}-batch.1.1.1.1.0",
        # What cannot be told apart by model.
        "$JS.API.STREAM.MSG.GET.HR_BATCH_default", "$JS.API.STREAM.MSG.DELETE.HR_BATCH_default",
        "$JS.API.STREAM.MSG.GET.HR_PROGRESS", "$JS.API.STREAM.CREATE.HR_INTERACTIVE", "hr.host.h",
        *FORBIDDEN["worker"]["publish"],
    ]  # fmt: skip
    subscribe = [
        f"hr.worker.{other}.*", f"hr.peer.{other}.*", f"hr.peer.{other}.w", "hr.worker.*.*",
        f"hr.cancel.{other}", "hr.cancel.*", f"hr.tokenizer.{other}",
        f"_INBOX_worker.{other}.x", f"_INBOX_worker.{other}.>", "_INBOX_worker.>", "_INBOX_worker.*.x",
        *FORBIDDEN["worker"]["subscribe"],
    ]  # fmt: skip
    worker = await as_worker(OWN)
    assert [s for s in publish if await worker.can_publish(s)] == []
    assert [s for s in subscribe if await worker.can_subscribe(s)] == []


async def test_login_of_one_worker_speaks_and_hears_under_its_name_alone(server: NatsServer) -> None:
    worker = await connect_as(server.url, "w-m-one.1", "worker", scope="m")
    assert await worker.can_publish("hr.worker.m.one_2e1")
    assert await worker.can_publish("hr.peer.m.w")
    assert await worker.can_subscribe("hr.worker.m.*")
    assert await worker.can_subscribe("hr.peer.m.one_2e1")
    assert not await worker.can_publish("hr.worker.m.w")
    assert not await worker.can_subscribe("hr.peer.m.w")
    await worker.client.close()


async def test_consumer_of_its_own_name_cannot_be_made_for_the_requests_of_another(as_worker: AsWorker) -> None:
    worker = await as_worker(OWN)
    filters = {"filter_subject": f"hr.req.{OTHER_TOKEN}.interactive"}
    config = {"durable_name": "m-interactive", "name": "m-interactive", "ack_policy": "explicit", **filters}
    body = json.dumps({"stream_name": INTERACTIVE_STREAM, "config": config}).encode()
    subject = f"$JS.API.CONSUMER.CREATE.{INTERACTIVE_STREAM}.m-interactive.hr.req.m.interactive"
    answer = json.loads((await worker.client.request(subject, body, timeout=10)).data)
    assert "did not match" in answer["error"]["description"]


async def test_worker_of_another_model_is_told_before_it_begins(server: NatsServer) -> None:
    with pytest.raises(WrongRoleError, match=rf"may not listen to _INBOX_worker\.{OTHER_TOKEN}\.>"):
        await connect(server.url, role="worker", name="w", scope=OTHER_TOKEN, user="w-m", password="pw")
    with pytest.raises(DependencyError, match="refuses the user or password"):
        await connect(server.url, role="worker", name="w", scope="m", user="w-m", password="wrong")


async def test_worker_with_the_login_of_another_worker_is_told_which_before_it_loads_its_model(
    server: NatsServer,
) -> None:
    login = {"NATS_URL": server.url, "NATS_USER": "worker-m.one_2e1", "NATS_PASSWORD": "pw", "MODEL": "/nothere"}
    environ = {f"HEADRACE_{name}": value for name, value in login.items()}
    told = {
        "--served-model-name=m": "this login is for the worker 'one.1': start with --worker-id one.1",
        "--served-model-name=n": "this login is for the model 'm': start with --served-model-name m",
    }
    for option, words in told.items():
        done = await asyncio.to_thread(headrace, "worker", option, "--worker-id", "two", **environ)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    (found,) = [each for each in await _doctor(server, None) if each.topic == "nats rights"]
    assert found.level is not Level.PROBLEM
    (found,) = [each for each in await _doctor(server, "two") if each.topic == "nats rights"]
    assert (found.level, "--worker-id one.1" in found.text) == (Level.PROBLEM, True)


async def _doctor(server: NatsServer, worker: str | None) -> list[Finding]:
    """Return the findings for the user of one worker, as `headrace doctor` and `headrace worker --check` ask."""
    user = "worker-m.one_2e1"
    model, own = served_by(user) or (None, None)
    return await nats_findings(NatsLogin(server.url, "worker", user, "pw", NatsFiles(), model, worker or own))


@pytest.mark.slow
async def test_people_and_jobs_are_answered_by_workers_with_a_login_for_their_model(tmp_path: Path) -> None:
    users = [user_block(model, f'user: "w-{encode_name(model)}", password: "pw"') for model in (OWN, OTHER)]
    with secured_server(tmp_path / "nats", "".join(users)) as server, contextlib.ExitStack() as stack:
        admin = (await connect_as(server.url, "admin")).client
        await ensure_streams(admin.jetstream(), LIMITS, ["default"])
        await admin.close()
        port = free_port()
        gateway = {"PORT": str(port), "API_KEY": "k", "NATS_USER": "gateway", "NATS_PASSWORD": PASSWORDS["gateway"]}
        stack.enter_context(_process("gateway", server.url, tmp_path / "gateway.log", gateway))
        for model in (OWN, OTHER):
            token = encode_name(model)
            worker = {"MODEL": str(DEMO_MODEL), "SERVED_MODEL_NAME": model, "SIMULATE": "1", "NATS_USER": f"w-{token}"}
            log = tmp_path / f"worker-{token}.log"
            stack.enter_context(_process("worker", server.url, log, {**worker, "NATS_PASSWORD": "pw"}))
        headers = {"Authorization": "Bearer k"}
        batch = (await connect_as(server.url, "batch")).client
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
            for model in (OWN, OTHER):
                body = {"model": model, "prompt": "x", "max_tokens": 4}
                assert (await _answered(client, body))["usage"]["completion_tokens"] == 4
                tokens = await client.post("/tokenize", json={"model": model, "prompt": "x"})
                assert tokens.status_code == 200
                job = {"id": f"job-{encode_name(model)}", "model": model, "text": "x", "sampling": {"max_tokens": 4}}
                results = await batch.subscribe(f"hr.result.default.{encode_name(job['id'])}")
                await batch.jetstream().publish(f"hr.req.{encode_name(model)}.batch.default", json.dumps(job).encode())
                result = json.loads((await results.next_msg(timeout=30)).data)
                assert (result["finish"], result["completion_tokens"]) == ("length", 4)
        await batch.close()
    assert "permissions violation" not in _printed_by_workers(tmp_path)


def _printed_by_workers(directory: Path) -> str:
    return "".join(log.read_text().lower() for log in directory.glob("worker-*.log"))


@contextlib.contextmanager
def _process(part: str, nats_url: str, log: Path, settings: dict[str, str]) -> Iterator[None]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {"HEADRACE_NATS_URL": nats_url} | {f"HEADRACE_{name}": value for name, value in settings.items()}
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "ops.cli", part], env=environ, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(40)


async def _answered(client: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Ask until the model is served."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx2.TransportError):
                answer = await client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    return answer.json()
            await asyncio.sleep(0.2)


def test_printed_user_is_one_that_nats_reads(tmp_path: Path) -> None:
    printed = CliRunner().invoke(worker_login, [OTHER])
    assert printed.exit_code == 0
    assert f'user: "worker-{OTHER_TOKEN}", password: "p' in printed.output
    one = CliRunner().invoke(worker_login, [OWN, "--worker-id", "one.1"])
    assert '"hr.worker.m.one_2e1"' in one.output
    assert 'user: "worker-m.one_2e1"' in one.output
    nkey = "U" + "A" * 55
    keyed = CliRunner().invoke(worker_login, [OTHER, "--nkey", nkey])
    assert f'nkey: "{nkey}"' in keyed.output
    refused = CliRunner().invoke(worker_login, [OTHER, "--nkey", "x"])
    assert "a user's public NKey is" in str(refused.exception)
    for option in ("--worker-id", "--nkey"):  # as of a variable that is not set
        assert "is empty" in str(CliRunner().invoke(worker_login, [OWN, option, ""]).exception)
