from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.stack import tether
from ops.stack.child import Child, ChildLog, ChildSpec, Exit
from ops.stack.console import Console
from tests.servers import is_alive
from tests.waiting import until, wait_for

SLEEP = "import time; time.sleep(60)"


class Watched:
    """A child that runs Python code, and what it has reported."""

    def __init__(self, directory: Path, code: str, stop_timeout_s: float = 5.0) -> None:
        self.output = io.StringIO()
        self.pids: list[int] = []
        self.exits: list[Exit] = []
        self.log = directory / "sample.log"
        spec = ChildSpec("worker", "sample", (sys.executable, "-c", code), dict(os.environ), stop_timeout_s)
        self.child = Child(spec, directory, Console(self.output), started=self._started, ended=self._ended)

    async def run_until(self, condition: Callable[[], object]) -> None:
        """Run the child until something is so, and stop it."""
        self.child.start()
        await until(condition, 30)
        await self.child.stop()

    def _started(self, child: Child) -> None:
        assert child.pid is not None
        self.pids.append(child.pid)

    def _ended(self, child: Child, exit_: Exit) -> bool:
        self.exits.append(exit_)
        return True


async def test_stopped_child_ends_by_sigterm_and_is_not_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEP)
    await watched.run_until(lambda: watched.pids)
    assert not is_alive(watched.pids[0])
    assert (len(watched.pids), watched.exits, watched.child.pid) == (1, [], None)


async def test_crashed_child_is_started_again_and_the_reason_shown(tmp_path: Path) -> None:
    code = f"import os, sys\nif os.path.exists({str(tmp_path / 'second')!r}):\n {SLEEP}\n"
    code += f"open({str(tmp_path / 'second')!r}, 'w')\nprint('the disk is on fire', file=sys.stderr)\nsys.exit(7)"
    watched = Watched(tmp_path, code)
    await watched.run_until(lambda: len(watched.pids) == 2)
    assert watched.exits == [Exit(7, ("the disk is on fire",))]
    assert "exited with code 7; starting it again in 0.1 s" in watched.output.getvalue()
    assert "| the disk is on fire" in watched.output.getvalue()


async def test_worker_that_was_drained_is_started_again_without_its_log(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "print('all is done')")
    await watched.run_until(lambda: len(watched.pids) == 2)
    assert "was drained; starting it again in 0.1 s" in watched.output.getvalue()
    assert "all is done" not in watched.output.getvalue()


async def test_pauses_between_crashes_grow(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "raise SystemExit(1)")
    await watched.run_until(lambda: len(watched.exits) >= 4)
    pauses = [line.split()[-2] for line in watched.output.getvalue().splitlines() if "again in" in line]
    assert pauses[:3] == ["0.1", "0.2", "0.4"]


async def test_child_that_ignores_sigterm_is_killed_with_its_group(tmp_path: Path) -> None:
    code = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); time.sleep(60)"
    watched = Watched(tmp_path, code, stop_timeout_s=0.2)
    watched.child.start()
    await until(lambda: watched.log.exists() and watched.log.read_text().strip(), 30)
    grandchild = int(watched.log.read_text())
    await watched.child.stop()
    assert "did not end within 0.2 s; killing it" in watched.output.getvalue()
    await until(lambda: not is_alive(grandchild), 30)


async def test_end_of_a_child_is_seen_while_a_stopped_grandchild_holds_its_output(tmp_path: Path) -> None:
    code = "import os, signal, subprocess, sys\n"
    code += f"grandchild = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
    code += "os.kill(grandchild.pid, signal.SIGSTOP); print(grandchild.pid, flush=True); sys.exit(7)"
    watched = Watched(tmp_path, code)
    async with asyncio.timeout(20):
        await watched.run_until(lambda: len(watched.exits) == 2)
    assert watched.exits[0].returncode == 7
    for exit_ in watched.exits:
        grandchild = int(exit_.last_lines[0])
        await until(lambda grandchild=grandchild: not is_alive(grandchild), 30)


async def test_child_stopped_between_two_lives_stays_stopped(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "raise SystemExit(1)")
    await watched.run_until(lambda: len(watched.exits) == 3)
    await asyncio.sleep(0.5)
    assert len(watched.exits) == 3


async def test_warnings_reach_the_console_and_everything_the_log(tmp_path: Path) -> None:
    code = "print('t INFO x fine'); print('t WARNING x odd'); print('x' * 200_000, flush=True);" + SLEEP
    watched = Watched(tmp_path, code)
    await watched.run_until(lambda: watched.log.exists() and watched.log.stat().st_size > 200_000)
    assert "t WARNING x odd" in watched.output.getvalue()
    assert "fine" not in watched.output.getvalue()
    assert watched.log.read_text().startswith("t INFO x fine\nt WARNING x odd\nxxx")


async def test_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "")
    spec = ChildSpec("worker", "sample", ("/nonexistent/binary",), {}, 1.0)
    child = Child(spec, tmp_path, Console(io.StringIO()), started=watched._started, ended=watched._ended)
    child.start()
    await until(lambda: watched.exits, 30)
    await child.stop()
    assert watched.exits[0] == Exit(127, ("/nonexistent/binary cannot be started: No such file or directory",))


async def test_child_is_kept_running_where_its_log_cannot_be_written(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "gone", "import sys; print('here'); sys.exit(7)")
    await watched.run_until(lambda: len(watched.exits) == 2)
    assert watched.exits == [Exit(7, ("here",))] * 2


async def test_log_goes_on_when_its_folder_is_there_again(tmp_path: Path) -> None:
    log, output, lines = ChildLog(tmp_path / "logs" / "sample.log"), asyncio.StreamReader(), list[bytes]()
    reading = asyncio.create_task(log.read_from(output, lines.append))
    output.feed_data(b"lost\n")
    while not lines:  # noqa: ASYNC110 - the other task sets it
        await asyncio.sleep(0)
    (tmp_path / "logs").mkdir()
    output.feed_data(b"kept\n")
    output.feed_eof()
    await reading
    log.close()
    assert (tmp_path / "logs" / "sample.log").read_bytes() == b"kept\n"


def test_full_log_moves_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.stack.child.MAX_LOG_BYTES", 100)
    watched = Watched(tmp_path, "for _ in range(5): print('y' * 59, flush=True); import time; time.sleep(0.05)")
    asyncio.run(watched.run_until(lambda: watched.exits))
    assert watched.log.stat().st_size <= 100
    assert (tmp_path / "sample.log.1").stat().st_size <= 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, sys
from ops.stack.child import Child, ChildSpec
from ops.stack.console import Console

async def main():
    spec = ChildSpec("worker", "sample", (sys.executable, "-c", {SLEEP!r}), dict(os.environ), 5.0)
    child = Child(spec, pathlib.Path({str(tmp_path)!r}), Console(), started=lambda c: print(c.pid, flush=True),
                  ended=lambda c, e: True)
    child.start()
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_for(lambda: b"time.sleep" in Path(f"/proc/{child}/cmdline").read_bytes().rpartition(b"-c")[2])
            time.sleep(0.2)
            assert is_alive(child)
            parent.kill()
            wait_for(lambda: not is_alive(child))
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_modules_that_the_environment_puts_in_front_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise SystemExit(3)")
    command = tether.tethered(["sh", "-c", "echo $$ $PYTHONPATH"])
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.communicate(timeout=30)[0].split() == [str(child.pid), str(tmp_path)]
    assert child.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_nothing_is_started_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    command = tether.tethered(["touch", str(tmp_path / "started")])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, check=False, timeout=30).returncode == 127
    assert not (tmp_path / "started").exists()
