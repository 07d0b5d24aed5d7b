"""What `headrace doctor` says of processes that stand still or have gone, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.doctor.finding import Finding, Level
from ops.doctor.processes import process_findings
from ops.stack.process_tree import is_stopped
from ops.stack.state import LOCK_FILE, ReadyFile
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of processes")
NATS = "nats://127.0.0.1:47115"
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that sleeps and whose command line is that of a part, and return its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def run(part: str, **environ: str) -> int:
        # Python takes the second word for the name of its program.
        (tmp_path / part).write_text("import time\ntime.sleep(600)\n")
        started.append(
            subprocess.Popen(["headrace", part], executable=sys.executable, cwd=tmp_path, env=os.environ | environ)
        )
        return started[-1].pid

    yield run
    for process in started:
        process.kill()
        process.wait()


def _ready(**pids: list[int]) -> ReadyFile:
    return ReadyFile("", "", NATS, NATS, None, "", "", pids)


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    for _ in range(600):
        if is_stopped(pid):
            return
        time.sleep(0.05)
    pytest.fail("the process was not stopped")


def _only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize("part", ["worker", "gateway", "nats"])
def test_part_that_a_signal_has_stopped_is_a_problem_with_its_remedy(start: Start, tmp_path: Path, part: str) -> None:
    stopped, other = start(part), start("redis")
    ready = _ready(redis=[other], **{part: [stopped]})
    assert _only(process_findings(tmp_path, ready, None)).level is Level.FINE
    _stop(stopped)
    finding = _only(process_findings(tmp_path, ready, None))
    assert finding.level is Level.PROBLEM
    assert f"{part} {stopped} stands still: a signal has stopped it" in finding.text
    assert f"`kill -CONT {stopped}`" in finding.remedy


def test_supervisor_that_the_terminal_has_stopped_is_found_by_its_lock(start: Start, tmp_path: Path) -> None:
    supervisor = start("up")
    (tmp_path / LOCK_FILE).write_text(str(supervisor))
    _stop(supervisor)
    assert f"up {supervisor} stands still" in _only(process_findings(tmp_path, _ready(), None)).text


def test_worker_of_the_same_nats_is_found_by_what_it_was_told(start: Start, tmp_path: Path) -> None:
    mine = start("worker", HEADRACE_NATS_URL=f"nats://worker:secret@{NATS.rpartition('/')[2]}")
    start("worker", HEADRACE_NATS_URL="nats://127.0.0.1:47116")
    start("bench", HEADRACE_NATS_URL=NATS)
    _wait_for_command(mine)
    assert _only(process_findings(tmp_path, None, NATS)).text == f"worker {mine}"
    _stop(mine)
    assert f"worker {mine} stands still" in _only(process_findings(tmp_path, None, NATS)).text


def test_supervisor_that_was_killed_is_told_of_and_nothing_of_nobody(start: Start, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / LOCK_FILE).write_text(str(ended.pid))
    finding = _only(process_findings(tmp_path, _ready(worker=[ended.pid + 2**21]), None))
    assert (finding.level, finding.remedy) == (Level.WARNING, "start it anew")
    assert "has ended without stopping its parts" in finding.text
    assert list(process_findings(tmp_path, None, None)) == []


def _wait_for_command(pid: int) -> None:
    """Wait until the process is no copy of this one any more."""
    wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"headrace\0"))
