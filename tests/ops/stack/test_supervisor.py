from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ops.stack import probe
from ops.stack.child import ChildSpec
from ops.stack.config import UpConfig
from ops.stack.console import Console
from ops.stack.plan import Plan, make_plan
from ops.stack.state import StateDirectory, read_ready_file
from ops.stack.supervisor import Supervisor
from shared.config import resolve
from shared.errors import DependencyError
from tests.waiting import until


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    state = StateDirectory(tmp_path)
    yield state
    state.close()


@pytest.fixture
def plan(state: StateDirectory) -> Plan:
    return make_plan(resolve(UpConfig, {"port": "0"}, {}), state, {})


class NoHost:
    """A host without models."""

    pids: tuple[int, ...] = ()

    def adopt(self, *workers: object) -> None:
        pass

    async def start(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, timeout_s: float) -> None:
        pass

    def kill(self) -> None:
        pass


def supervise(plan: Plan, state: StateDirectory, said: io.StringIO | None = None) -> Supervisor:
    return Supervisor(plan, state, None, Console(said or io.StringIO()), 10, cast("Any", NoHost()))


def shell(role: str, script: str) -> ChildSpec:
    return ChildSpec(role, role, ("sh", "-c", script), dict(os.environ), 5.0)


def told_pids(state_dir: Path, role: str) -> list[int]:
    found = read_ready_file(state_dir)
    return [] if found is None else found.pids[role]


def num_starts(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_ready_file_that_cannot_be_written_is_told_once_and_tried_again(
    tmp_path: Path, plan: Plan, state: StateDirectory
) -> None:
    """In a state directory that was deleted, or on a full disk.

    It raised within a child's own task: that child was never started again.
    """
    said = io.StringIO()
    running = supervise(plan, state, said)
    shutil.rmtree(tmp_path)
    running._write_ready_files()
    running._write_ready_files()
    assert said.getvalue().count("ready.json cannot be written: No such file or directory") == 1
    assert said.getvalue().count("\n") == 1
    tmp_path.mkdir()
    running._write_ready_files()
    found = read_ready_file(tmp_path)
    assert found is not None
    assert found.url == plan.url
    # What has been written is not written again, wherever it went.
    shutil.rmtree(tmp_path)
    running._write_ready_files()
    assert said.getvalue().count("\n") == 1
    tmp_path.mkdir()


@pytest.mark.parametrize(("status", "expected"), [(2, 1), (1, 3)])
async def test_part_that_refuses_its_settings_or_ends_three_times_ends_a_start(
    tmp_path: Path, plan: Plan, state: StateDirectory, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    file = tmp_path / "starts"
    nats = shell("nats", f"echo begun >>{file}; echo no such option; exit {status}")
    running = supervise(dataclasses.replace(plan, nats=nats, redis=None), state)
    monkeypatch.setattr(running._roll_call, "open", asyncio.Event().wait)
    message = f"nats exited with code {status}: no such option (its log: {state.logs / 'nats.log'})"
    with pytest.raises(DependencyError, match=re.escape(message)):
        await asyncio.wait_for(running.start(), 30)
    # What needs NATS is not started before it answers.
    assert [child.spec.role for child in running._children] == ["nats"]
    await running.stop()
    assert num_starts(file) == expected


@pytest.mark.parametrize("redis_url", [None, "redis://127.0.0.1:1"])
async def test_own_nats_that_does_not_answer_is_told_with_its_log_and_that_there_is_no_redis(
    plan: Plan, state: StateDirectory, monkeypatch: pytest.MonkeyPatch, redis_url: str | None
) -> None:
    nats, said = shell("nats", "exec sleep 60"), io.StringIO()
    running = supervise(dataclasses.replace(plan, nats=nats, redis=None, redis_url=redis_url), state, said)

    async def refuse() -> None:
        raise DependencyError("NATS did not answer.")

    monkeypatch.setattr(running._roll_call, "open", refuse)
    message = f"NATS did not answer. This command has started that NATS (its log: {state.logs / 'nats.log'})"
    with pytest.raises(DependencyError, match=re.escape(message)):
        await asyncio.wait_for(running.start(), 30)
    await running.stop()
    assert ("running without the response cache" in said.getvalue()) is (redis_url is None)


@pytest.mark.parametrize(("role", "model"), [("redis", None), ("worker", "ready")])
async def test_redis_is_started_again_at_any_time_and_all_parts_once_the_system_was_ready(
    tmp_path: Path, plan: Plan, state: StateDirectory, role: str, model: str | None
) -> None:
    file = tmp_path / "starts"
    running = supervise(plan, state)
    running.model = model
    running._start_children([shell(role, f"echo begun >>{file}; exit 2")])
    await until(lambda: num_starts(file) == 4, 30)
    assert (read_ready_file(tmp_path) is not None) == (model is not None), "the file is there once the system is ready"
    await running.stop()


async def test_system_is_ready_only_when_the_last_worker_has_joined(
    tmp_path: Path, plan: Plan, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> tuple[str, str]:
        return "a-model", probe.READY

    monkeypatch.setattr(probe, "first_generation", answer)
    running = supervise(dataclasses.replace(plan, workers=(shell("worker", "exec sleep 60"),)), state)
    running._start_children(running._plan.workers)
    await until(lambda: running._children[0].pid, 30)
    first = asyncio.create_task(running._ask_until_answered())
    await asyncio.sleep(0.2)
    assert not first.done()
    assert running._waited_for() == "the worker is starting"
    running._note_progress("worker", b"t INFO gpu_worker.start.progress_bar loading done=1 of=4 percent=25")
    assert running._waited_for() == "the worker is loading (1 of 4)"
    running._note_missing("no answer yet")
    assert running._waited_for() == "no answer yet"
    pids = running._pids("worker")
    running._roll_call.workers.update(pids)
    running.model = await first
    assert running.model == "a-model"
    # The ready file has its successor as soon as that runs.
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: told_pids(tmp_path, "worker") not in (pids, []), 30)
    assert told_pids(tmp_path, "worker") == running._pids("worker")
    await running.stop()


@pytest.mark.parametrize(("part", "other"), [("_watching", "_hosting"), ("_hosting", "_watching")])
async def test_running_system_keeps_its_ready_file_and_ends_when_nobody_watches_it(
    tmp_path: Path, plan: Plan, state: StateDirectory, part: str, other: str
) -> None:
    running = supervise(plan, state)
    waiting = asyncio.create_task(running.wait())
    await until(lambda: read_ready_file(tmp_path), 30)
    assert not waiting.done()

    async def fail() -> None:
        raise RuntimeError("the watch has failed")

    going_on = asyncio.create_task(asyncio.Event().wait())
    setattr(running, other, going_on)
    failing = running._watch(cast("Any", SimpleNamespace(run=fail))) if part == "_watching" else fail()
    setattr(running, part, asyncio.create_task(failing))
    with pytest.raises(RuntimeError, match="the watch has failed"):
        await asyncio.wait_for(waiting, 10)
    await running.stop()
    assert going_on.cancelled() or going_on.cancelling()
    assert read_ready_file(tmp_path) is None


async def test_gateways_are_stopped_first_and_what_workers_write_to_last(
    tmp_path: Path, plan: Plan, state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events"
    running = supervise(plan, state)

    async def leave() -> None:
        with file.open("a") as events:
            events.write("roll call\n")

    monkeypatch.setattr(running._roll_call, "close", leave)
    on_end = "trap 'echo {1} >>{0}; exit' TERM; echo up >>{0}; while :; do sleep 0.01; done"
    running._start_children(shell(role, on_end.format(file, role)) for role in ("nats", "redis", "worker", "gateway"))
    await until(lambda: num_starts(file) == 4, 30)
    await running.stop()
    events = file.read_text().splitlines()[4:]
    assert events[:3] == ["gateway", "worker", "roll call"]
    assert sorted(events[3:]) == ["nats", "redis"]
