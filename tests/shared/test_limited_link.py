"""The link to a limited process, with shell scripts in the place of that process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from shared import limited_link, limited_process
from shared.limited_link import LimitedLink, LimitedProcessError
from shared.limited_process import HEAD, READY, Limits, Outcome
from tests.gateway.wire_worker import until


def frame(number: int, outcome: Outcome) -> bytes:
    content = msgspec.msgpack.encode(outcome)
    return HEAD.pack(number, len(content), 0) + content


class Scripted:
    """A link whose processes run a script, which says that it is ready and then does what the test wants."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.link = LimitedLink("none", 5.0, "the process of the test")
        self._monkeypatch = monkeypatch
        self.starts = directory / "starts"
        self.starts.touch()
        (directory / "ready").write_bytes(frame(READY, Outcome()))

    def script(self, *lines: str, is_ready: bool = True) -> None:
        """Let processes that start from now on run these lines of a shell."""
        program = self.directory / "program"
        opening = [
            "#!/bin/sh",
            f"cd {self.directory}",
            "echo >> starts",
            "exec 3>&1",
            *(["cat ready"] if is_ready else []),
        ]
        program.write_text("\n".join([*opening, *lines]) + "\n")
        program.chmod(0o700)
        self._monkeypatch.setattr(sys, "executable", str(program))

    @property
    def num_starts(self) -> int:
        return len(self.starts.read_text().splitlines())

    def file(self, name: str) -> bytes:
        path = self.directory / name
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
async def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scripted]:
    scripted = Scripted(tmp_path, monkeypatch)
    yield scripted
    await scripted.link.close()


async def test_process_is_started_once_for_all_who_wait_for_it(scripted: Scripted) -> None:
    scripted.script("exec cat > asked")
    assert scripted.link.pid is None
    await asyncio.gather(*(scripted.link.start() for _ in range(3)))
    pid = scripted.link.pid
    assert pid is not None
    await scripted.link.start()
    assert (scripted.num_starts, scripted.link.pid) == (1, pid)


async def test_process_that_dies_is_started_and_asked_once_more_and_no_oftener(scripted: Scripted) -> None:
    scripted.script("exec cat >> asked")
    asking = asyncio.create_task(scripted.link.ask(b"work", 7))
    whole = b""
    for number in (1, 2):
        whole += HEAD.pack(number, len(b"work"), 7) + b"work"
        await until(lambda expected=whole: scripted.file("asked") == expected)  # type: ignore[misc]
        assert not asking.done()
        assert scripted.link.pid is not None
        os.kill(scripted.link.pid, signal.SIGKILL)
    with pytest.raises(LimitedProcessError):
        await asking
    assert scripted.num_starts == 2


async def test_process_that_does_not_answer_in_time_is_ended(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.script("exec cat > asked")
    await scripted.link.start()
    first = scripted.link.pid
    monkeypatch.setattr(limited_link, "ANSWER_GRACE_S", -4.98)
    with pytest.raises(LimitedProcessError):
        await scripted.link.ask(b"work", 0)
    assert scripted.num_starts == 2
    assert scripted.link._running.waiting == {}
    for pid in (first, scripted.link.pid):
        assert pid is not None
        assert not psutil.pid_exists(pid)
    # The next one is asked of a new process.
    await scripted.link.start()
    assert scripted.num_starts == 3


async def test_outcomes_are_told_apart_by_number_and_those_for_nobody_are_left(scripted: Scripted) -> None:
    message = b"work"
    (scripted.directory / "answers").write_bytes(
        frame(1, Outcome(b"for nobody")) + frame(99, Outcome(b"for nobody")) + frame(3, Outcome(b"three", True, 0.5))
    )
    (scripted.directory / "last").write_bytes(frame(2, Outcome(b"two")))
    scripted.script(f"head -c {3 * (HEAD.size + len(message))} > asked", "cat answers last", "exec cat > more")
    await scripted.link.start()
    pid = scripted.link.pid
    leaving = asyncio.create_task(scripted.link.ask(message, 0))
    await asyncio.sleep(0)
    assert scripted.link._running is not None
    await until(lambda: list(scripted.link._running.waiting) == [1])  # type: ignore[union-attr]
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    two, three = await asyncio.gather(*(scripted.link.ask(message, 0) for _ in range(2)))
    assert (two, three) == (Outcome(b"two"), Outcome(b"three", True, 0.5))
    assert scripted.link._running.waiting == {}
    assert scripted.link.pid == pid


def ended_by(number: int) -> bytes:
    os.kill(os.getpid(), number)
    return b"not ended"


def without_memory(_: bytes) -> bytes:
    return bytes(1 << 40)


async def test_work_that_the_system_ends_is_told_from_work_that_its_limits_end() -> None:
    limits = Limits(cpu_s=5.0, time_s=5.0, memory_bytes=1 << 28, stack_bytes=1 << 20)
    outcomes = [
        limited_process.outcome_of(limited_process.begin(1, 0, b"", work, limits))
        for work in (
            lambda _: ended_by(signal.SIGKILL),
            lambda _: ended_by(signal.SIGPROF),
            without_memory,
        )
    ]
    assert [each.content for each in outcomes] == [None] * 3
    assert [each.is_interrupted for each in outcomes] == [True, False, False]
    assert [each.is_late for each in outcomes] == [False, True, False]


def alarmed(cpu_s: float) -> bytes:
    """Use that much of a processor, and be ended as by the limit of time."""
    while time.process_time() < cpu_s:
        pass
    return ended_by(signal.SIGALRM)


async def test_work_that_got_no_processor_is_interrupted_and_not_late() -> None:
    limits = Limits(cpu_s=60.0, time_s=60.0, memory_bytes=1 << 28, stack_bytes=1 << 20)
    starved = limited_process.outcome_of(limited_process.begin(1, 0, b"", lambda _: alarmed(0.0), limits))
    assert (starved.content, starved.is_late, starved.is_interrupted) == (None, False, True)
    fork = limited_process.begin(1, 0, b"", lambda _: alarmed(0.2), limits)
    busy = limited_process.outcome_of(replace(fork, time_s=0.4))
    assert (busy.content, busy.is_late, busy.is_interrupted) == (None, True, False)


@pytest.mark.parametrize("num_interrupted", [1, 2])
async def test_interrupted_work_is_asked_once_more_and_no_oftener(scripted: Scripted, num_interrupted: int) -> None:
    second = Outcome(is_interrupted=True) if num_interrupted == 2 else Outcome(b"done")
    length = HEAD.size + len(b"work")
    for name, number, outcome in (("one", 1, Outcome(is_interrupted=True)), ("two", 2, second)):
        (scripted.directory / name).write_bytes(frame(number, outcome))
    scripted.script(f"head -c {length} > a", "cat one", f"head -c {length} > b", "cat two", "exec cat > more")
    if num_interrupted == 1:
        assert await scripted.link.ask(b"work", 0) == Outcome(b"done")
    else:
        with pytest.raises(LimitedProcessError):
            await scripted.link.ask(b"work", 0)
    assert (scripted.num_starts, scripted.file("more")) == (1, b"")


async def test_process_that_ends_while_nobody_waits_is_replaced(scripted: Scripted) -> None:
    scripted.script("exit 0")
    await scripted.link.start()
    await until(lambda: scripted.link._running is not None and scripted.link._running.has_ended)
    (scripted.directory / "answers").write_bytes(frame(1, Outcome(b"no")))
    scripted.script("head -c 1 > asked", "cat answers", "exec cat > more")
    assert await scripted.link.ask(b"work", 0) == Outcome(b"no")
    assert scripted.num_starts == 2


@pytest.mark.parametrize("is_there", [True, False])
async def test_process_that_does_not_start_is_told_and_tried_again_later(scripted: Scripted, is_there: bool) -> None:
    scripted.script("exit 1", is_ready=False)
    if not is_there:
        (scripted.directory / "program").unlink()
    with pytest.raises(LimitedProcessError):
        await scripted.link.start()
    with pytest.raises(LimitedProcessError):
        await scripted.link.ask(b"work", 0)
    # Once for the start, and twice for the question.
    assert scripted.num_starts == (3 if is_there else 0)
    scripted.script("exec cat > asked")
    await scripted.link.start()
    assert scripted.link.pid is not None


async def test_process_that_lives_on_and_has_closed_its_output_is_ended(scripted: Scripted) -> None:
    scripted.script("exec 3>&-", "exec cat > asked")
    await scripted.link.start()
    pid = scripted.link.pid
    assert pid is not None
    await until(lambda: not psutil.pid_exists(pid))
    scripted.script("exec cat > asked")
    await scripted.link.start()
    assert scripted.link.pid != pid


async def test_process_that_is_never_ready_is_ended(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_link, "START_TIMEOUT_S", 0.05)
    scripted.script("exec sleep 6543", is_ready=False)
    with pytest.raises(LimitedProcessError):
        await scripted.link.start()
    assert scripted.link.pid is None
    assert not [child for child in psutil.Process().children() if "6543" in child.cmdline()]


@pytest.mark.parametrize("is_there", [False, True])
async def test_link_that_is_closed_while_its_process_starts_ends_it(scripted: Scripted, is_there: bool) -> None:
    scripted.script("exec sleep 6544", is_ready=False)
    starting = asyncio.create_task(scripted.link.start())
    if is_there:
        await until(lambda: scripted.num_starts == 1)
    else:
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await scripted.link.close()
        with pytest.raises(LimitedProcessError):
            await starting
    assert not [child for child in psutil.Process().children() if "6544" in child.cmdline()]


async def test_closed_link_ends_its_process_and_fails_what_waits(scripted: Scripted) -> None:
    scripted.script("exec cat > asked")
    await scripted.link.start()
    pid = scripted.link.pid
    assert pid is not None
    asking = asyncio.create_task(scripted.link.ask(b"work", 0))
    await until(lambda: scripted.file("asked") != b"")
    await scripted.link.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(LimitedProcessError):
        await asking
    for again in (scripted.link.start(), scripted.link.ask(b"work", 0)):
        with pytest.raises(LimitedProcessError):
            await again
    assert scripted.num_starts == 1
    await scripted.link.close()


def test_process_gets_the_path_of_modules_and_no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setattr(sys, "path", ["", "/modules"])
    expected = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": f"{Path.cwd()}{os.pathsep}/modules"}
    assert limited_link._environment() == expected
