"""What the parent of gateway processes decides: whom to start and when, whom to kill or drain, when to refuse."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from gateway.process import processes
from gateway.process.processes import (
    FROZEN_ROUNDS,
    REFUSE_ROUNDS,
    RESTART_MAX_S,
    RESTART_MIN_S,
    STABLE_S,
    START_ROUNDS,
    ProcessState,
    _Child,
)
from tests.gateway.process.parent_of_two import NOW, PIDS, ParentOfTwo

SERVING, DRAINING = ProcessState.SERVING, ProcessState.DRAINING


def test_first_process_that_serves_lets_clients_in_once(parent: ParentOfTwo) -> None:
    assert parent.calls == ["listen"]
    assert not parent.group._starts


def test_process_that_fails_soon_is_started_later_and_later(parent: ParentOfTwo) -> None:
    delays = []
    for _ in range(7):
        parent.group._note_exit(parent.child(PIDS[0]), 1)
        (start,) = parent.group._starts
        delays.append(start.at - NOW)
        parent.child(PIDS[0]).delay_s = start.delay_s
        parent.group._starts.clear()
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, RESTART_MAX_S, RESTART_MAX_S]


def test_process_that_has_served_for_long_is_started_again_at_once(parent: ParentOfTwo) -> None:
    child = parent.child(PIDS[0])
    child.delay_s = RESTART_MAX_S
    child.started_at -= STABLE_S - 1
    parent.group._note_exit(child, -signal.SIGKILL)
    child.started_at -= 2
    parent.group._note_exit(child, -signal.SIGKILL)
    assert parent.starts_in() == [RESTART_MAX_S, RESTART_MIN_S]
    assert [start.delay_s for start in parent.group._starts] == [RESTART_MAX_S, 2 * RESTART_MIN_S]


def test_end_of_a_process_is_told_by_signal_or_status(parent: ParentOfTwo, caplog: pytest.LogCaptureFixture) -> None:
    parent.group._note_exit(parent.child(PIDS[0]), -signal.SIGKILL)
    parent.group._note_exit(parent.child(PIDS[1]), 3)
    assert "process 0 ended with signal 9 after 0.0 s; another one in 0.5 s" in caplog.messages[0]
    assert "process 1 ended with status 3" in caplog.messages[1]


def test_process_that_drained_has_its_replacement_already(
    parent: ParentOfTwo, caplog: pytest.LogCaptureFixture
) -> None:
    child = parent.child(PIDS[0])
    with caplog.at_level(logging.INFO):
        parent.group._note_state(child, DRAINING)
        parent.group._note_state(child, DRAINING)
        assert parent.starts_in() == [0.0]
        assert [start.delay_s for start in parent.group._starts] == [RESTART_MIN_S]
        parent.group._note_exit(child, 0)
    assert parent.starts_in() == [0.0]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "process 0 drained" in caplog.text


def test_status_of_a_stopped_group_is_that_of_the_first_process_that_failed(parent: ParentOfTwo) -> None:
    parent.group._stop(signal.SIGTERM, None)
    assert parent.calls == ["listen", "close"]
    assert parent.killed == [(pid, signal.SIGTERM) for pid in PIDS]
    for code, status in ((0, 0), (-9, 9), (1, 9), (0, 9)):
        parent.group._note_exit(parent.child(PIDS[0]), code)
        assert parent.group._status == status
    assert not parent.group._starts


def test_stopped_group_tells_those_that_are_left(parent: ParentOfTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        parent.killed.append((pid, number))
        if pid == PIDS[0]:
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    parent.group._stop(signal.SIGTERM, None)
    assert [pid for pid, _ in parent.killed] == list(PIDS)


def test_silence_is_counted_in_rounds_and_a_beat_ends_it(parent: ParentOfTwo, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(FROZEN_ROUNDS - 1):
        parent.beat(1)
        parent.group._read_beats(0.0)
        parent.group._judge()
    assert parent.killed == []
    parent.beat(1)
    parent.group._read_beats(0.0)
    parent.group._judge()
    assert parent.killed == [(PIDS[0], signal.SIGKILL)]
    assert f"process 0, pid {PIDS[0]}, stood still for 2.0 s: killed" in caplog.text
    # It gets the same time to end before it is killed again.
    parent.beat(1)
    parent.group._read_beats(0.0)
    parent.group._judge()
    assert len(parent.killed) == 1


def test_process_that_starts_is_given_more_time(parent: ParentOfTwo) -> None:
    child = parent.child(PIDS[0])
    child.state = None
    child.silent_rounds = START_ROUNDS - 1
    assert not child.is_frozen
    child.silent_rounds += 1
    assert child.is_frozen


def test_last_state_of_several_beats_counts(parent: ParentOfTwo) -> None:
    parent.beat(0, b"srd")
    parent.beat(1, b"dsr")
    parent.group._read_beats(0.0)
    assert (parent.child(PIDS[0]).state, parent.child(PIDS[1]).state) == (DRAINING, SERVING)


def test_process_that_has_ended_beats_no_more_and_others_are_read(parent: ParentOfTwo) -> None:
    os.close(parent.pipes[0][1])
    parent.beat(1, b"d")
    parent.group._read_beats(0.0)
    assert parent.child(PIDS[1]).state is DRAINING
    assert parent.group._poll.poll(0) == []
    parent.pipes[0] = (parent.pipes[0][0], os.dup(parent.pipes[1][1]))


def test_clients_are_refused_once_no_process_has_served_for_a_while(
    parent: ParentOfTwo, caplog: pytest.LogCaptureFixture
) -> None:
    for pid in PIDS:
        parent.child(pid).state = ProcessState.STARTING

    def judge(rounds: int) -> None:
        for _ in range(rounds):
            for pid in PIDS:
                parent.child(pid).silent_rounds = 0
            parent.group._judge()

    judge(REFUSE_ROUNDS - 1)
    assert parent.calls == ["listen"]
    judge(5)
    assert parent.calls == ["listen", "refuse"]
    assert caplog.messages == ["no process has served for a while: clients are refused"]
    # One that leaves lets no client in; one that serves does, and the rounds are counted anew.
    parent.child(PIDS[0]).is_leaving = True
    parent.group._note_state(parent.child(PIDS[0]), SERVING)
    assert parent.calls == ["listen", "refuse"]
    parent.group._note_state(parent.child(PIDS[1]), SERVING)
    assert parent.calls == ["listen", "refuse", "listen"]
    parent.child(PIDS[1]).state = ProcessState.STARTING
    judge(REFUSE_ROUNDS - 1)
    assert parent.calls == ["listen", "refuse", "listen"]
    judge(1)
    assert parent.calls[-1] == "refuse"


def test_one_process_that_serves_is_enough(parent: ParentOfTwo) -> None:
    parent.child(PIDS[0]).state = ProcessState.STARTING
    for _ in range(2 * REFUSE_ROUNDS):
        for pid in PIDS:
            parent.child(pid).silent_rounds = 0
        parent.group._judge()
    assert parent.calls == ["listen"]


def test_stopping_group_neither_refuses_nor_listens(parent: ParentOfTwo) -> None:
    parent.group._stop(signal.SIGTERM, None)
    parent.calls.clear()
    parent.child(PIDS[0]).state = parent.child(PIDS[1]).state = ProcessState.STARTING
    parent.group._unserved_rounds = REFUSE_ROUNDS
    parent.group._judge()
    parent.group._is_refusing = True
    parent.group._note_state(parent.child(PIDS[0]), SERVING)
    assert parent.calls == []


def test_processes_are_drained_one_after_the_other(parent: ParentOfTwo) -> None:
    parent.group._drain_all(signal.SIGUSR1, None)
    parent.group._drain_next()
    assert parent.killed == [(PIDS[0], signal.SIGTERM)]
    assert parent.child(PIDS[0]).is_leaving
    # Not while the replacement of the first one is still to be started, nor while it starts.
    parent.group._drain_next()
    parent.group._starts.clear()
    parent.child(PIDS[1]).state = ProcessState.STARTING
    parent.group._drain_next()
    assert len(parent.killed) == 1
    parent.child(PIDS[1]).state = SERVING
    parent.group._drain_next()
    assert parent.killed[1:] == [(PIDS[1], signal.SIGTERM)]
    parent.group._starts.clear()
    parent.group._drain_next()
    assert len(parent.killed) == 2


def test_process_that_drains_or_has_ended_is_not_told_to(parent: ParentOfTwo) -> None:
    parent.child(PIDS[0]).is_leaving = True
    parent.group._drain_all(signal.SIGUSR1, None)
    assert parent.group._to_drain == [PIDS[1]]
    del parent.group._children[PIDS[1]]
    parent.group._drain_next()
    assert (parent.killed, parent.group._to_drain, parent.group._starts) == ([], [], [])


def test_due_processes_are_started_in_free_slots_and_others_wait(parent: ParentOfTwo) -> None:
    parent.group._starts = [
        processes._Start(NOW + 60, 1.0),
        processes._Start(NOW - 1, 2.0),
        processes._Start(NOW - 2, 4.0),
    ]
    parent.child(PIDS[0]).slot = 1
    parent.child(PIDS[1]).slot = 2
    parent.group._start_due()
    assert parent.forked == [(0, 2.0), (0, 4.0)]
    assert [start.delay_s for start in parent.group._starts] == [1.0]


def test_process_without_a_slot_waits_for_one(parent: ParentOfTwo) -> None:
    parent.group._starts = [processes._Start(0.0, 1.0)]
    for slot in range(2 * processes.SLOTS_PER_PROCESS):
        parent.group._children[1000 + slot] = _Child(slot, 0, 1000 + slot, -1, 0.0, 1.0)
    parent.group._start_due()
    assert parent.forked == []
    assert len(parent.group._starts) == 1
    last = 1000 + 2 * processes.SLOTS_PER_PROCESS - 1
    del parent.group._children[last]
    parent.group._start_due()
    assert parent.forked == [(2 * processes.SLOTS_PER_PROCESS - 1, 1.0)]


def test_stopping_group_starts_none(parent: ParentOfTwo) -> None:
    parent.group._starts = [processes._Start(0.0, 1.0)]
    parent.group._stop(signal.SIGTERM, None)
    parent.group._start_due()
    assert parent.forked == []
