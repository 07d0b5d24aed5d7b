"""Which children stand still: by rounds alone, and with real processes that are stopped by signals; full disks."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.stack import liveness as liveness_module
from ops.stack.child import NATS_QUESTION, REDIS_QUESTION, Child, ChildSpec, HealthCheck, answers, is_stopped
from ops.stack.console import Console
from ops.stack.liveness import MAX_ROUND_S, ROOM_BYTES, ROUND_S, Liveness, StorageWatch, Watch
from ops.stack.ports import free_port
from ops.stack.roll_call import Beat, RollCall
from tests.gateway.wire_worker import until
from tests.integration.system import System, running_system
from tests.servers import NatsServer, RedisServer
from tests.waiting import wait_for

LIMIT_S = 10.0
HANG_TIMEOUT_S = 2
PID = os.getpid()


def rounds(liveness: Liveness, count: int, *, pid: int = 1, answered: bool = False, stopped: bool = False) -> bool:
    """Whether the process was found standing still in any of these rounds."""
    found = [liveness.note_round(pid, ROUND_S, answered=answered, stopped=stopped) for _ in range(count)]
    return any(found)


def alive(patience: float = 1.0) -> Liveness:
    liveness = Liveness(LIMIT_S, patience)
    assert not rounds(liveness, 2, answered=True)
    return liveness


def test_silence_after_a_sign_of_life_is_standing_still_once_it_is_long_enough() -> None:
    liveness = alive()
    assert not rounds(liveness, 19)
    assert rounds(liveness, 1)


def test_sign_of_life_ends_a_silence() -> None:
    liveness = alive()
    for _ in range(10):
        assert not rounds(liveness, 19)
        assert not rounds(liveness, 1, answered=True)


def test_process_that_has_never_answered_is_left_alone_unless_it_is_stopped() -> None:
    liveness = Liveness(LIMIT_S)
    assert not rounds(liveness, 10_000)
    assert not rounds(liveness, 19, stopped=True)
    assert rounds(liveness, 1, stopped=True)


def test_patience_is_for_silence_and_not_for_stopped_processes() -> None:
    assert not rounds(alive(patience=3.0), 59)
    assert rounds(alive(patience=3.0), 60)
    assert rounds(alive(patience=3.0), 20, stopped=True)


def test_stopped_process_is_not_saved_by_an_old_answer() -> None:
    assert rounds(alive(), 20, answered=True, stopped=True)


def test_new_process_begins_anew() -> None:
    liveness = alive()
    assert not rounds(liveness, 19)
    assert not rounds(liveness, 1000, pid=2)


def test_nobody_is_judged_while_nothing_could_be_heard() -> None:
    liveness = alive()
    for _ in range(1000):
        assert not liveness.note_round(1, ROUND_S, answered=False, stopped=False, can_judge=False)
    assert not rounds(liveness, 19)


@given(st.lists(st.floats(min_value=0.0, max_value=MAX_ROUND_S), max_size=9))
def test_few_rounds_are_never_enough_however_long_they_took(times: list[float]) -> None:
    liveness = alive()
    assert not any(liveness.note_round(1, round_s, answered=False, stopped=True) for round_s in times)


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def test_stopped_process_is_told_from_a_running_one(sleeper: int) -> None:
    assert not is_stopped(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    wait_for(lambda: is_stopped(sleeper))
    os.kill(sleeper, signal.SIGCONT)
    wait_for(lambda: not is_stopped(sleeper))
    assert not is_stopped(2**22 + 1)


async def test_servers_answer_while_they_run_and_not_while_they_are_frozen(
    start_nats: Callable[..., NatsServer], start_redis: Callable[..., RedisServer]
) -> None:
    nats, redis = start_nats(), start_redis("--requirepass", "secret")
    for server, question in ((nats, NATS_QUESTION), (redis, REDIS_QUESTION)):
        check = HealthCheck(server.port, question)
        assert await answers(check, 10)
        server.pause()
        # The signal reaches the threads of a process one by one.
        await until(lambda pid=server.pid: is_stopped(pid))
        await asyncio.sleep(0.1)
        assert not await answers(check, 0.3)
        server.resume()
        assert await answers(check, 10)
        server.kill()
        assert not await answers(check, 10)


class Hearing:
    """A roll call that is connected, and hears the workers in `beats`."""

    def __init__(self) -> None:
        self.beats: dict[int, Beat] = {}
        self.is_connected = True
        self.num_looks = 0

    def take_beats(self) -> dict[int, Beat]:
        self.num_looks += 1
        return self.beats


async def test_server_that_hangs_without_being_stopped_is_started_anew(tmp_path: Path) -> None:
    port = free_port()
    code = "import socket, time\n"
    code += f"s = socket.create_server(('127.0.0.1', {port}))\nfor _ in range(3): s.accept()[0].send(b'x')\n"
    command = (sys.executable, "-c", code + "time.sleep(60)")
    spec = ChildSpec("redis", "redis", command, dict(os.environ), 5.0, HealthCheck(port, REDIS_QUESTION))
    pids: list[int] = []
    console = Console(output := io.StringIO())
    child = Child(spec, tmp_path, console, started=lambda it: pids.append(it.pid or 0), ended=lambda it, exit_: True)
    child.start()
    watching = asyncio.create_task(Watch([child], cast("RollCall", Hearing()), console, HANG_TIMEOUT_S).run())
    await until(lambda: len(pids) == 2, 30)
    watching.cancel()
    await child.stop()
    assert "has given no sign of life for" in output.getvalue()
    assert "was killed by SIGKILL; starting it again" in output.getvalue()


@pytest.mark.parametrize(
    ("beats", "is_connected", "why"),
    [
        ({}, True, "has given no sign of life for"),
        ({PID: Beat(step=5, advances=False)}, True, "has work, but has made no step for"),
        ({PID: Beat(step=9, advances=True)}, True, None),
        ({}, False, None),
    ],
    ids=["silent", "stalled", "well", "nats is away"],
)
async def test_worker_that_falls_silent_or_stalls_is_replaced_and_no_other(
    monkeypatch: pytest.MonkeyPatch, beats: dict[int, Beat], is_connected: bool, why: str | None
) -> None:
    for name, value in (("ROUND_S", 0.001), ("MAX_ROUND_S", 0.002), ("STALL_S", 0.04)):
        monkeypatch.setattr(liveness_module, name, value)
    hearing, replaced, output = Hearing(), asyncio.Event(), io.StringIO()
    worker = SimpleNamespace(spec=ChildSpec("worker", "w", (), {}, 5.0), pid=PID, replace=replaced.set)
    watch = Watch([cast("Child", worker)], cast("RollCall", hearing), Console(output), 0.01)
    watching = asyncio.create_task(watch.run())
    hearing.beats = {PID: Beat(step=5, advances=True)}
    await until(lambda: hearing.num_looks > 100)
    assert not replaced.is_set()
    hearing.beats, hearing.is_connected, hearing.num_looks = beats, is_connected, 0
    await until(lambda: replaced.is_set() if why else hearing.num_looks > 200)
    watching.cancel()
    assert replaced.is_set() == (why is not None)
    assert (why or "") in output.getvalue()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("impatient")
    with running_system(directory, "--simulate", "5", "--hang-timeout-s", str(HANG_TIMEOUT_S)) as running:
        yield running


def _serves(system: System) -> bool:
    try:
        answer = system.client(timeout=5).completions.create(model=system.model, prompt="x", max_tokens=2)
    except Exception:
        return False
    return len(answer.choices) == 1


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "gateway", "nats", "redis"])
def test_frozen_part_is_killed_and_started_anew(impatient: System, role: str) -> None:
    victim = impatient.info["pids"][role][0]
    others = {name: pids for name, pids in impatient.info["pids"].items() if name != role}
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: impatient.info["pids"][role] not in ([], [victim]))
    assert "has given no sign of life for" in impatient.log.read_text()
    wait_for(lambda: _serves(impatient))
    assert {name: pids for name, pids in impatient.info["pids"].items() if name != role} == others


@pytest.mark.slow
def test_pause_of_everything_kills_nobody(impatient: System) -> None:
    wait_for(lambda: _serves(impatient))
    pids = impatient.info["pids"]
    log = impatient.log.read_text()
    everybody = [impatient.process.pid, *(pid for some in pids.values() for pid in some)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(7)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    time.sleep(HANG_TIMEOUT_S * 4)
    assert impatient.info["pids"] == pids
    assert "sign of life" not in impatient.log.read_text().removeprefix(log)
    assert _serves(impatient)


@pytest.mark.slow
def test_frozen_parent_of_gateway_processes_is_replaced_with_them(tmp_path: Path) -> None:
    arguments = ("--simulate", "5", "--gateways", "2", "--hang-timeout-s", str(HANG_TIMEOUT_S))
    with running_system(tmp_path, *arguments) as system:
        children = system.info["pids"]["gateway"]
        parent = int(Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGSTOP)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (parent, *children)))
        wait_for(lambda: len(set(system.info["pids"]["gateway"]) - set(children)) == 2)
        wait_for(lambda: _serves(system))


COMPLAINT = (
    b"[1] [ERR] JetStream failed to store a msg on stream '$G > HR_RESULTS': write 1.blk: no space left on device"
)


@pytest.mark.parametrize(
    ("seen", "is_replaced"),
    [
        ([(True, 0), (True, 0), (True, ROOM_BYTES), (True, ROOM_BYTES)], [False, False, False, True]),
        ([(True, ROOM_BYTES - 1)] * 100, [False] * 100),
        ([(True, 0), (True, ROOM_BYTES), (False, ROOM_BYTES)], [False] * 3),
        ([(False, ROOM_BYTES)] * 100, [False] * 100),
        ([(True, ROOM_BYTES)] * 5, [False, True, False, True, False]),
    ],
    ids=["complains on beside room", "full disk", "before there was room", "silent", "replaced: has a round"],
)
def test_server_is_replaced_for_complaints_while_its_disk_has_room(
    seen: list[tuple[bool, int]], is_replaced: list[bool]
) -> None:
    """In each round the server complained or not, and so much was free at its end."""
    watch = StorageWatch(Path("/"), lambda: None)
    for (complains, free_bytes), expected in zip(seen, is_replaced, strict=True):
        watch.note_line(COMPLAINT if complains else b"[1] [INF] Server is ready")
        assert watch.note_round(free_bytes) == expected


async def test_running_watch_replaces_the_server_while_its_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "STORAGE_ROUND_S", 0.01)
    replaced = asyncio.Event()
    watch = StorageWatch(tmp_path, replaced.set)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(10):
        while not replaced.is_set():
            watch.note_line(COMPLAINT)
            await asyncio.sleep(0.001)
    running.cancel()


async def test_watch_goes_on_where_the_directory_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = asyncio.Event()

    def usage(directory: Path) -> None:
        looks.set() if is_deleted.is_set() else is_deleted.set()
        raise FileNotFoundError(directory)

    is_deleted = asyncio.Event()
    monkeypatch.setattr(liveness_module, "STORAGE_ROUND_S", 0.01)
    monkeypatch.setattr("shutil.disk_usage", usage)
    running = asyncio.create_task(StorageWatch(tmp_path, lambda: None).run())
    async with asyncio.timeout(10):
        await looks.wait()
    running.cancel()
