"""Several gateway processes on one port, while they are replaced, killed, frozen and paused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import psutil
import pytest

from gateway.process import processes
from gateway.process.processes import ParentLink, ProcessGroup, ProcessState
from tests.gateway.gateway_process import GatewayProcess, running_gateway
from tests.gateway.known_worker import known_worker, until_known
from tests.gateway.raw_client import connected
from tests.gateway.wire_worker import WireWorker, expected_text, until
from tests.servers import NatsServer

OPERATOR_KEY = "operator-key-for-tests"


@asynccontextmanager
async def serving_worker(nats_url: str, *gateways: GatewayProcess) -> AsyncIterator[WireWorker]:
    async with known_worker(nats_url, *gateways) as worker:
        serving = asyncio.create_task(worker.serve(0.001))
        yield worker
        serving.cancel()


def served_by(gateway: GatewayProcess) -> list[int]:
    """Return the pids of all processes that have ever begun to serve, oldest first."""
    return [int(pid) for pid in re.findall(r" serving .*?pid=(\d+)", gateway.log)]


async def ask(gateway: GatewayProcess, model: str) -> str:
    """Ask for tokens on a new connection, without any retry, and say how it went."""
    try:
        async with asyncio.timeout(30), connected(gateway) as client:
            client.post(
                "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 2, "seed": time.time_ns() % 99}
            )
            status, answer = await client.whole()
    except (OSError, EOFError, TimeoutError) as error:
        return type(error).__name__
    is_whole = status == 200 and answer["choices"][0]["text"] == expected_text(2)
    return "served" if is_whole else f"{status} {answer}"


async def ask_until(gateway: GatewayProcess, model: str, done: asyncio.Event) -> Counter[str]:
    """Ask again and again, each time on a new connection."""
    outcomes: Counter[str] = Counter()
    while not done.is_set():
        outcomes[await ask(gateway, model)] += 1
    return outcomes


async def test_rolling_restart_fails_no_request(nats_url: str, tmp_path: Path) -> None:
    # As shipped: a process that starts serves once it has heard the fleet.
    with running_gateway(tmp_path, nats_url, is_patient=False, processes=2) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        async with serving_worker(nats_url, gateway) as worker:
            done = asyncio.Event()
            asking = [asyncio.create_task(ask_until(gateway, worker.model, done)) for _ in range(4)]
            for num_served in (4, 6):
                gateway.process.send_signal(signal.SIGUSR1)
                await until(lambda n=num_served: len(served_by(gateway)) == n, 60)
            await until(lambda: len(psutil.Process(gateway.process.pid).children()) == 2, 60)
            done.set()
            outcomes = sum(await asyncio.gather(*asking), Counter())
        assert set(outcomes) == {"served"}
        assert outcomes["served"] > 20
        assert len(set(served_by(gateway))) == 6
        assert {child.pid for child in psutil.Process(gateway.process.pid).children()} == set(served_by(gateway)[-2:])


async def test_process_that_drains_is_replaced_before_it_ends(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url, processes=2, drain_timeout_s=60) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        async with known_worker(nats_url, gateway) as worker, connected(gateway) as client:
            client.post("/v1/completions", {"model": worker.model, "prompt": "a", "stream": True})
            request = await worker.begin(1)
            await client.head()
            for pid in served_by(gateway):
                os.kill(pid, signal.SIGTERM)
            await until(lambda: len(served_by(gateway)) == 4, 60)
            await worker.say(request, 1, 3)
            await worker.end(request, 3)
            chunks = await client.stream()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(3)
        assert "ERROR" not in gateway.log


async def test_frozen_process_takes_no_new_connection_and_is_replaced(nats_url: str, tmp_path: Path) -> None:
    # As shipped: the process in its place serves once it has heard the fleet.
    with running_gateway(tmp_path, nats_url, is_patient=False, processes=2) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        async with serving_worker(nats_url, gateway) as worker:
            victim = served_by(gateway)[0]
            os.kill(victim, signal.SIGSTOP)
            done = asyncio.Event()
            # A connection that the frozen process had would break when that is killed.
            asking = [asyncio.create_task(ask_until(gateway, worker.model, done)) for _ in range(2)]
            await until(lambda: len(served_by(gateway)) == 3, 60)
            # Those whose connections are the new process's are among the next ones.
            asked_late = Counter([await ask(gateway, worker.model) for _ in range(20)])
            done.set()
            assert set(sum(await asyncio.gather(*asking), asked_late)) == {"served"}
        assert f"pid {victim}, stood still for 2.0 s: killed" in gateway.log
        assert not psutil.pid_exists(victim)


async def test_frozen_process_does_not_keep_the_group_from_stopping(nats_url: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, nats_url, processes=2) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        os.kill(served_by(gateway)[0], signal.SIGSTOP)
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(gateway.process.wait, 40)
        assert not any(psutil.pid_exists(pid) for pid in served_by(gateway))


@pytest.mark.slow
@pytest.mark.parametrize("is_parent_first", [True, False])
async def test_pause_of_everything_kills_no_process(nats_url: str, tmp_path: Path, is_parent_first: bool) -> None:
    with running_gateway(tmp_path, nats_url, processes=2) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        everybody = [gateway.process.pid, *served_by(gateway)]
        order = everybody if is_parent_first else everybody[::-1]
        for pid in order:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        for pid in order:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(3)
        assert "stood still" not in gateway.log
        assert {child.pid for child in psutil.Process(gateway.process.pid).children()} == set(served_by(gateway))


async def test_one_scrape_shows_all_processes_and_follows_replacements(nats_url: str, tmp_path: Path) -> None:
    settings = {"processes": 2, "operator_port": 0, "operator_key": OPERATOR_KEY}
    with running_gateway(tmp_path, nats_url, **settings) as gateway:
        found = re.search(r"operator's port .*?url=(http://\S+)", gateway.log)
        assert found is not None

        def processes() -> set[str]:
            headers = {"Authorization": f"Bearer {OPERATOR_KEY}", "Connection": "close"}
            answer = httpx2.get(f"{found[1]}/metrics", headers=headers)
            assert answer.status_code == 200
            return set(re.findall(r'^headrace_active_streams\{process="(\d+)"\}', answer.text, re.MULTILINE))

        await until(lambda: processes() == {"0", "1"}, 60)
        assert httpx2.get(f"{found[1]}/metrics").status_code == 401
        assert httpx2.get(f"{gateway.url}/metrics").status_code == 404
        os.kill(served_by(gateway)[0], signal.SIGKILL)
        await until(lambda: len(served_by(gateway)) == 3, 60)
        await until(lambda: processes() == {"0", "1"}, 60)


@pytest.mark.slow
async def test_port_on_which_no_process_can_serve_refuses_until_one_can(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    server = start_nats()
    with running_gateway(tmp_path, server.url, processes=2) as gateway:
        await until(lambda: len(served_by(gateway)) == 2, 60)
        server.kill()
        for pid in served_by(gateway):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: "clients are refused" in gateway.log, 20)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", gateway.port)
        server.start()
        await until(lambda: len(served_by(gateway)) >= 3, 40)
        async with serving_worker(server.url) as worker, asyncio.timeout(10):
            with contextlib.suppress(TimeoutError):
                await until_known(gateway, worker.model)
            assert await ask(gateway, worker.model) == "served"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    yield read, write
    for end in (read, write):
        with contextlib.suppress(OSError):
            os.close(end)


def test_state_is_told_at_once_and_with_each_beat(pipe: tuple[int, int]) -> None:
    link = ParentLink(0, 0, pipe[1])
    link.beat()
    link.enter(ProcessState.SERVING)
    link.beat()
    link.enter(ProcessState.DRAINING)
    assert os.read(pipe[0], 99) == b"srrd"
    assert link.state is ProcessState.DRAINING


def test_parent_that_does_not_read_or_is_dead_does_not_end_the_process(pipe: tuple[int, int]) -> None:
    link = ParentLink(0, 0, pipe[1])
    with contextlib.suppress(BlockingIOError):
        while os.write(pipe[1], bytes(4096)):
            pass
    link.enter(ProcessState.SERVING)
    os.close(pipe[0])
    link.enter(ProcessState.DRAINING)
    assert link.state is ProcessState.DRAINING


async def test_process_beats_as_long_as_its_loop_runs(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BEAT_INTERVAL_S", 0.001)
    beating = asyncio.create_task(ParentLink(0, 0, pipe[1]).beat_forever())
    beats = b""
    while len(beats) < 3:
        await asyncio.sleep(0.002)
        with contextlib.suppress(BlockingIOError):
            beats += os.read(pipe[0], 99)
    assert set(beats) == set(b"s")
    assert not beating.done()
    beating.cancel()


def test_parent_goes_on_where_it_cannot_refuse_clients() -> None:
    listeners = Mock(refuse=Mock(side_effect=OSError))
    group: Any = SimpleNamespace(
        _children={}, _unserved_rounds=processes.REFUSE_ROUNDS - 2, _is_refusing=False, _is_stopping=False
    )
    group._listeners = listeners
    for num_refusals in (0, 1, 1):
        ProcessGroup._judge(group)
        assert (listeners.refuse.call_count, group._is_refusing) == (num_refusals, num_refusals == 1)
