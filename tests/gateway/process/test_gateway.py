"""A gateway process as its supervisor sees it: start, drain, several processes on one port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gateway.process.gateway import GC_THRESHOLDS
from gateway.process.listeners import RESERVED_FILES
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_interactive_stream
from tests.gateway.gateway_process import START_TIMEOUT_S, GatewayProcess, running_gateway, starting_gateway
from tests.gateway.known_worker import known_worker
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import expected_text, until
from tests.servers import NatsServer


async def test_terminated_gateway_lets_streams_finish(nats_url: str, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with running_gateway(tmp_path, nats_url, drain_timeout_s=10, audit_file=audit) as gateway:
        async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
            client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
            request = await worker.begin(2)
            await client.head()
            gateway.process.send_signal(signal.SIGTERM)
            await until(lambda: "draining" in gateway.log)
            await worker.say(request, 2, 4)
            await worker.end(request, 4)
            chunks = await client.stream()
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(4)
            assert await asyncio.to_thread(gateway.process.wait, 20) == 0
    (entry,) = map(json.loads, audit.read_text().splitlines())
    assert (entry["action"], entry["outcome"]) == ("gateway.drain", "done")


async def test_drain_that_takes_too_long_cuts_streams_explicitly(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url, drain_timeout_s=0.3) as gateway:
        async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
            client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
            request = await worker.begin()
            # A stream whose first token is late is opened all the same.
            await asyncio.wait_for(client.head(), 10)
            await worker.say(request, 0, 1)
            gateway.process.send_signal(signal.SIGTERM)
            objects = await client.stream()
            assert objects[-1]["error"]["code"] == "shutting_down"
            assert await asyncio.to_thread(gateway.process.wait, 20) == 0
            await until(lambda: any(request.id in cancel.ids for cancel in worker.cancels))


async def test_processes_share_the_port_and_dead_ones_come_back(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url, processes=2) as gateway:
        await until(lambda: len(re.findall(r" serving .*?pid=(\d+)", gateway.log)) == 2, 60)
        pids = {int(pid) for pid in re.findall(r" serving .*?pid=(\d+)", gateway.log)}
        assert {child.pid for child in psutil.Process(gateway.process.pid).children()} == pids
        connections = {}
        for pid in pids:
            connections[pid] = [c for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
        assert [c[0].laddr.port for c in connections.values()] == [gateway.port] * 2
        os.kill(min(pids), signal.SIGKILL)
        await until(lambda: len(re.findall(r" serving .*?pid=(\d+)", gateway.log)) == 3, 60)
        async with connected(gateway) as client:
            client.post("/v1/completions", {"model": "m", "prompt": []})
            assert (await client.whole())[0] == 400
        children = psutil.Process(gateway.process.pid).children()
        assert await asyncio.to_thread(gateway.stop) == 0
        assert not any(child.is_running() for child in children)


async def test_children_of_a_killed_parent_end(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url, processes=2) as gateway:
        children = psutil.Process(gateway.process.pid).children()
        assert len(children) == 2
        gateway.process.kill()
        gateway.process.wait()
        await until(lambda: not any(child.is_running() for child in children), 30)


DYING_TASK = """
import gc
import sys
from gateway.__main__ import run
from gateway.http1.connection_table import ConnectionTable

num_sweeps = 0

def sweep(self):
    global num_sweeps
    num_sweeps += 1
    if num_sweeps > 3:
        print("collected", gc.get_threshold(), gc.get_freeze_count() > 10_000, file=sys.stderr)
        raise RuntimeError("a bug in the sweep")

ConnectionTable.sweep = sweep
sys.exit(run())
"""


def test_dead_task_ends_the_gateway_and_is_named(nats_url: str) -> None:
    environ = os.environ | {"HEADRACE_PORT": "0", "HEADRACE_NATS_URL": nats_url, "HEADRACE_API_KEY": "sk"}
    done = subprocess.run(
        [sys.executable, "-c", DYING_TASK], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "task 'sweep of connections' failed" in done.stderr
    assert "a bug in the sweep" in done.stderr
    # What stays for ever is not looked at again, and requests are not what makes the collector run.
    assert f"collected {GC_THRESHOLDS} True" in done.stderr


@pytest.mark.slow
def test_taken_port_is_named(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url) as gateway:
        environ = os.environ | {
            "HEADRACE_PORT": str(gateway.port),
            "HEADRACE_NATS_URL": nats_url,
            "HEADRACE_API_KEY": "sk",
        }
        second = subprocess.run(
            [sys.executable, "-m", "gateway"], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2
        assert "HEADRACE_PORT" in second.stderr


async def test_gateway_stops_while_nats_is_away(start_nats: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = start_nats()
    with running_gateway(tmp_path, server.url) as gateway:
        async with connected(gateway) as client:
            client.post("/v1/completions", {"model": "m", "prompt": "x"})
            assert (await client.whole())[0] == 503
        server.kill()
        await until(lambda: "connection to NATS is lost" in gateway.log)
        await asyncio.sleep(0.3)
        assert await asyncio.to_thread(gateway.stop, 20) == 0


async def test_gateway_waits_for_jetstream(start_nats: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = start_nats()
    server.kill()
    server.has_jetstream = False
    server.start()
    with starting_gateway(tmp_path, server.url) as gateway:
        await until(
            lambda: "waiting for the stream of interactive requests: NATS runs without JetStream" in gateway.log, 60
        )
        server.has_jetstream = True
        server.restart()
        await until(lambda: " serving " in gateway.log, 60)


# NATS answers no call that a login may not make, and five seconds are waited for each.
SOON_GIVING_UP = """
import functools
import sys

from gateway.__main__ import run
from shared.direct_client import DirectClient

DirectClient.jetstream = functools.partialmethod(DirectClient.jetstream, timeout=1.0)
sys.exit(run())
"""


async def test_gateway_waits_for_a_stream_that_it_may_not_make(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = start_nats("-c", str(_restricted_users(tmp_path)))
    url = server.url.replace("//", "//part:part@")
    with starting_gateway(tmp_path, url, ("-c", SOON_GIVING_UP)) as gateway:
        await until(lambda: "stream HR_INTERACTIVE could not be created: NATS did not answer. If" in gateway.log, 60)
        assert "Traceback" not in gateway.log
        admin = await connect(server.url, role="admin", name="test", user="admin", password="admin")
        await ensure_interactive_stream(admin.jetstream(), StreamLimits())
        await until(lambda: " serving " in gateway.log, 60)
        # No client that waits for an answer needs the other streams.
        await until(lambda: "waiting for the streams of batch results and dead letters" in gateway.log, 60)
        await admin.close()


async def test_gateway_that_waits_can_be_stopped(start_nats: Callable[..., NatsServer], tmp_path: Path) -> None:
    server = start_nats()
    server.kill()
    server.has_jetstream = False
    server.start()
    with starting_gateway(tmp_path, server.url) as gateway:
        await until(lambda: "waiting for the stream" in gateway.log, 60)
        assert await asyncio.to_thread(gateway.stop, 20) == 0
        assert "Traceback" not in gateway.log


def _restricted_users(directory: Path) -> Path:
    """Return a configuration of NATS with a user `part` that may do everything but make streams, and an `admin`."""
    config = directory / "users.conf"
    config.write_text(
        "authorization { users: [ { user: admin, password: admin }, { user: part, password: part, "
        'permissions: { publish: { deny: ["$JS.API.STREAM.CREATE.>"] } } } ] }\n'
    )
    return config


async def test_gateway_whose_connection_nats_closes_for_good_ends_so_that_another_takes_its_place(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    config = tmp_path / "nats.conf"
    login = 'authorization { users: [{ user: gateway, password: "%s" }] }\n'
    config.write_text(login % "before")
    server = start_nats("-c", str(config))
    with running_gateway(tmp_path / "gateway", server.url, nats_user="gateway", nats_password="before") as gateway:
        config.write_text(login % "after")
        os.kill(server.pid, signal.SIGHUP)
        assert await asyncio.to_thread(gateway.process.wait, 60) == 1, gateway.log
        assert "NATS has closed the connection for good" in gateway.log


async def _status_and_rest(gateway: GatewayProcess, model: str) -> tuple[int, bytes]:
    async with connected(gateway) as client:
        client.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 2}, "Connection: close")
        status, _ = await client.head()
        return status, await client.reader.read()


async def test_gateway_of_256_files_answers_more_connections_than_that(nats_url: str, tmp_path: Path) -> None:
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    command = ("-c", limited + "runpy.run_module('gateway', run_name='__main__', alter_sys=True)")
    num_connections = 400
    with starting_gateway(tmp_path, nats_url, command) as gateway:
        await until(lambda: " serving " in gateway.log, START_TIMEOUT_S)
        async with known_worker(nats_url, gateway) as worker:
            asking = [asyncio.create_task(_status_and_rest(gateway, worker.model)) for _ in range(num_connections)]
            # Those that are one too many are refused while nothing is answered.
            await until(lambda: any(each.done() for each in asking), 60)
            serving = asyncio.create_task(worker.serve())
            answers = await asyncio.gather(*asking)
            serving.cancel()
    assert {status for status, _ in answers} == {200, 503}
    assert all(rest for _, rest in answers)
    assert sum(status == 200 for status, _ in answers) >= 256 - RESERVED_FILES
    assert "fewer connections than configured" in gateway.log
    assert "no more files can be opened" not in gateway.log
