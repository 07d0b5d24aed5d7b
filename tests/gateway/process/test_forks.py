"""Both sides of a fork of gateway processes: sockets and pipes kept or closed, and exit statuses."""

from __future__ import annotations

import logging
import os
import select
import signal

import pytest

from gateway.process.processes import ParentLink, ProcessGroup
from tests.gateway.process.parent_of_two import NOW, PIDS, ParentOfTwo


def test_forked_process_gets_the_first_free_socket_and_pipes_that_never_block(
    monkeypatch: pytest.MonkeyPatch, parent: ParentOfTwo
) -> None:
    parent.child(PIDS[0]).is_leaving = True
    monkeypatch.setattr(os, "fork", lambda: 777)
    ProcessGroup._fork(parent.group, 5, 4.0)
    child = parent.child(777)
    assert (child.slot, child.socket_index, child.pid, child.delay_s, child.state) == (5, 0, 777, 4.0, None)
    assert child.started_at == NOW
    assert not os.get_blocking(child.state_pipe)
    # Its writer is the child alone: this parent sees the end.
    assert parent.group._poll.poll(0) == [(child.state_pipe, select.POLLHUP)]
    assert parent.killed == []
    parent.group._is_stopping = True
    parent.child(777).is_leaving = True
    monkeypatch.setattr(os, "fork", lambda: 778)
    ProcessGroup._fork(parent.group, 6, 4.0)
    assert parent.killed == [(778, signal.SIGTERM)]
    for pid in (777, 778):
        os.close(parent.child(pid).state_pipe)


def test_child_of_a_fork_writes_its_state_and_reads_its_parents_end(
    monkeypatch: pytest.MonkeyPatch, parent: ParentOfTwo
) -> None:
    class Became(Exception):
        pass

    found: list[tuple[int, ParentLink]] = []

    def become(slot: int, link: ParentLink) -> None:
        found.append((slot, link))
        raise Became

    parent.child(PIDS[1]).is_leaving = True
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(parent.group, "_become_child", become)
    with pytest.raises(Became):
        ProcessGroup._fork(parent.group, 5, 4.0)
    ((slot, link),) = found
    assert (slot, link.socket_index, link.parent_pipe) == (5, 1, parent.group._pipe_read)
    assert not os.get_blocking(link.state_pipe)
    # No process reads any more, not even this process.
    with pytest.raises(BrokenPipeError):
        os.write(link.state_pipe, b"s")
    os.close(link.state_pipe)


@pytest.mark.parametrize("outcome", [5, RuntimeError("a bug")])
def test_child_keeps_nothing_of_its_parent_and_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, parent: ParentOfTwo, outcome: int | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[int] = []
    signals: dict[int, object] = {}
    ended: list[object] = []

    def run(slot: int, link: ParentLink) -> int:
        ended.append((slot, link))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    link = ParentLink(0, 0, 0)
    monkeypatch.setattr(parent.group, "_run", run)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", closed.append)
        patched.setattr(signal, "signal", signals.__setitem__)
        patched.setattr(logging, "shutdown", lambda: ended.append("logs are written"))
        patched.setattr(os, "_exit", ended.append)
        parent.group._become_child(3, link)
    assert ended == [(3, link), "logs are written", 5 if outcome == 5 else 1]
    assert closed == [parent.group._pipe_write, parent.pipes[0][0], parent.pipes[1][0]]
    assert signals == dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), signal.SIG_DFL)
    assert ("gateway process 3 failed" in caplog.text) is (outcome != 5)


def test_ended_processes_are_taken_out_and_strangers_are_no_matter(
    monkeypatch: pytest.MonkeyPatch, parent: ParentOfTwo
) -> None:
    ended = [(PIDS[0], signal.SIGKILL), (999, 0), (PIDS[1], 3 << 8), (0, 0)]
    asked: list[tuple[int, int]] = []

    def wait(pid: int, options: int) -> tuple[int, int]:
        asked.append((pid, options))
        return ended.pop(0)

    monkeypatch.setattr(os, "waitpid", wait)
    # The first one's pipe has been read to its end before.
    parent.group._poll.unregister(parent.pipes[0][0])
    exits: list[tuple[int, int]] = []
    monkeypatch.setattr(parent.group, "_note_exit", lambda child, code: exits.append((child.pid, code)))
    parent.group._reap()
    assert asked == [(-1, os.WNOHANG)] * 4
    assert exits == [(PIDS[0], -signal.SIGKILL), (PIDS[1], 3)]
    assert parent.freed == [0, 1]
    assert not parent.group._children
    for read, _ in parent.pipes:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read)
    assert parent.group._poll.poll(0) == []
    parent.pipes = [(os.dup(write), write) for _, write in parent.pipes]


def test_parent_without_children_reaps_none(monkeypatch: pytest.MonkeyPatch, parent: ParentOfTwo) -> None:
    def wait(pid: int, options: int) -> tuple[int, int]:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", wait)
    parent.group._reap()
    assert set(parent.group._children) == set(PIDS)
