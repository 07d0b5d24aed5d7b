"""A worker that `headrace up` has started and the host ends: it finishes first what it has."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from ops.stack.child import Child, ChildSpec
from ops.stack.console import Console
from ops.stack.hosting import worker_process
from ops.stack.hosting.wishes import Wish
from ops.stack.hosting.worker_process import AdoptedWorker, HostedWorker
from shared.errors import DependencyError
from tests.gateway.fleet.test_fleet import BEAT
from tests.servers import is_alive
from tests.waiting import until


class Adopted:
    """An adopted process that sleeps, and the orders to it."""

    def __init__(self, directory: Path, *, answers: bool = True) -> None:
        self.cordoned: list[str] = []
        self.ended: list[HostedWorker] = []
        self.answers = answers
        spec = ChildSpec("worker", "worker-0", ("sleep", "600"), dict(os.environ), 5.0)
        self.child = Child(
            spec, directory, Console(io.StringIO()), started=lambda child: None, ended=lambda child, exit_: True
        )

    async def start(self) -> AdoptedWorker:
        self.child.start()
        await until(lambda: self.child.pid is not None)
        return AdoptedWorker(self.child, Wish(name="m", path="/m"), self.cordon, self.ended.append)

    async def cordon(self, worker: str) -> None:
        self.cordoned.append(worker)
        if not self.answers:
            raise DependencyError("it does not answer")


async def test_it_takes_nothing_new_and_ends_once_it_has_finished(tmp_path: Path) -> None:
    adopted = Adopted(tmp_path)
    worker = await adopted.start()
    pid = worker.pid
    assert pid is not None
    assert worker.note_heartbeat(replace(BEAT, running=1)) is None
    worker.stop()
    assert worker.phase == "stopping"
    await until(lambda: adopted.cordoned == [BEAT.worker])
    # Idle before it has heard of its order, and then busy with what came before that.
    worker.note_heartbeat(replace(BEAT, running=0, waiting=0))
    worker.note_heartbeat(replace(BEAT, running=1, draining=True))
    stops: list[bool] = []
    stop, adopted.child.stop = adopted.child.stop, lambda: stops.append(True) or stop()  # type: ignore[func-returns-value, method-assign]
    for _ in range(5):
        await asyncio.sleep(0)
    assert (stops, is_alive(pid)) == ([], True)
    worker.note_heartbeat(replace(BEAT, running=0, waiting=0, draining=True))
    await until(lambda: adopted.ended == [worker])
    assert not is_alive(pid)
    assert adopted.child.pid is None


@pytest.mark.parametrize("answers", [False, True])
async def test_one_that_cannot_be_told_or_never_finishes_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(worker_process, "DRAIN_S", 0.05)
    adopted = Adopted(tmp_path, answers=answers)
    worker = await adopted.start()
    worker.note_heartbeat(replace(BEAT, running=1))
    worker.stop()
    await until(lambda: adopted.ended == [worker])


async def test_one_that_is_started_again_loads_until_it_is_heard(tmp_path: Path) -> None:
    adopted = Adopted(tmp_path)
    worker = await adopted.start()
    worker.note_heartbeat(replace(BEAT, running=1))
    pid = worker.pid
    adopted.child.replace()
    await until(lambda: worker.pid not in (None, pid))
    worker.watch(0.2, can_judge=True)
    assert (worker.phase, worker.seen().busy) == ("loading", False)
    load_s = worker.note_heartbeat(BEAT)
    assert load_s is not None
    assert load_s >= 0
    assert worker.phase == "ready"
    await adopted.child.stop()


@pytest.mark.parametrize("is_told", [False, True])
async def test_end_of_the_system_does_not_wait_for_it(tmp_path: Path, is_told: bool) -> None:
    adopted = Adopted(tmp_path)
    worker = await adopted.start()
    worker.note_heartbeat(replace(BEAT, running=1))
    if is_told:
        worker.stop()
        await until(lambda: bool(adopted.cordoned))
    worker.release()
    await adopted.child.stop()
    assert adopted.child.pid is None
    assert adopted.ended == []
