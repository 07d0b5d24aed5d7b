"""Which children stand still: they have not ended, but give no sign of life, and are to be replaced.

Time counts only while the supervisor itself runs: a pause of the machine, or of all processes at once, counts as one
round, however long it was. A child is watched from its first sign of life on, so one that loads a model or compiles
is left alone; only a process that a signal has stopped (SIGSTOP) is seen at any time. Heartbeats are not judged while
NATS, over which they come, does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ops.stack.child import Child, answers, is_stopped
from ops.stack.console import Console
from ops.stack.roll_call import RollCall

ROUND_S = 0.5
# What a round counts at most, however long it took.
MAX_ROUND_S = 2 * ROUND_S
# Heartbeats can also be kept away by a partition, and the gateways give a silent worker's requests to others within
# a second: there is no hurry to kill a process that may be well.
WORKER_PATIENCE = 3.0
# Steps of an engine may take long where kernels are compiled on their first use; longer than this, none does.
STALL_S = 120.0


class Liveness:
    """One child's silence.

    Attributes:
        silent_s: Waking seconds of the supervisor since the last sign of life.
    """

    def __init__(self, limit_s: float, patience: float = 1.0) -> None:
        self._limit_s = limit_s
        self._patience = patience
        self._pid: int | None = None
        self._has_answered = False
        self.silent_s = 0.0

    @property
    def is_well(self) -> bool:
        """Whether the latest sign of life is fresh."""
        return self._has_answered and self.silent_s <= MAX_ROUND_S

    def note_round(
        self, pid: int | None, round_s: float, *, answered: bool, stopped: bool, can_judge: bool = True
    ) -> bool:
        """Take in one round of `round_s` waking seconds; return whether the process stands still.

        With a new process, or none, everything begins anew. A stopped one's answer can only be an old one; where not
        `can_judge`, a sign of life would not have been noticed.
        """
        if pid != self._pid or pid is None:
            self._pid, self._has_answered, self.silent_s = pid, False, 0.0
            return False
        if stopped:
            self.silent_s += round_s
            return self.silent_s >= self._limit_s
        if answered or not can_judge or not self._has_answered:
            self._has_answered = self._has_answered or answered
            self.silent_s = 0.0
            return False
        self.silent_s += round_s
        return self.silent_s >= self._limit_s * self._patience


@dataclass(slots=True)
class _Watched:
    child: Child
    liveness: Liveness
    progress: Liveness
    answered: bool = False


class Watch:
    """Watches all children, and has those that stand still started anew."""

    def __init__(self, children: Iterable[Child], roll_call: RollCall, console: Console, limit_s: float) -> None:
        self._limit_s = limit_s
        self._roll_call = roll_call
        self._console = console
        patience = {"worker": WORKER_PATIENCE}
        self._watched = [
            _Watched(child, Liveness(limit_s, patience.get(child.spec.role, 1.0)), Liveness(STALL_S))
            for child in children
        ]

    async def run(self) -> None:
        """Watch for ever."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._watched:
                if each.child.spec.health_check is not None:
                    tasks.create_task(self._ask_forever(each))
            clock = asyncio.get_running_loop().time
            last = clock()
            while True:
                await asyncio.sleep(ROUND_S)
                now = clock()
                self._note_round(min(now - last, MAX_ROUND_S))
                last = now

    async def _ask_forever(self, each: _Watched) -> None:
        check = each.child.spec.health_check
        assert check is not None
        while True:
            if each.child.pid is not None and await answers(check, self._limit_s):
                each.answered = True
            await asyncio.sleep(ROUND_S)

    def _note_round(self, round_s: float) -> None:
        servers = [each.liveness for each in self._watched if each.child.spec.role == "nats"]
        can_hear = self._roll_call.is_connected and all(each.is_well for each in servers)
        beats = self._roll_call.take_beats()
        for each in self._watched:
            pid = each.child.pid
            stopped = pid is not None and is_stopped(pid)
            if each.child.spec.role == "worker":
                beat = None if pid is None else beats.get(pid)
                heard = beat is not None
                still = each.liveness.note_round(pid, round_s, answered=heard, stopped=stopped, can_judge=can_hear)
                # A round without a heartbeat tells nothing of the steps, and counts neither way.
                heard_s, advances = (0.0, False) if beat is None else (round_s, beat.advances)
                if each.progress.note_round(pid, heard_s, answered=advances, stopped=False):
                    self._replace(each, f"has work, but has made no step for {each.progress.silent_s:.0f} s")
            else:
                still = each.liveness.note_round(pid, round_s, answered=each.answered, stopped=stopped)
                each.answered = False
            if still:
                self._replace(each, f"has given no sign of life for {each.liveness.silent_s:.0f} s")

    def _replace(self, each: _Watched, why: str) -> None:
        self._console.say(each.child.spec.name, f"{why}; killing it")
        with contextlib.suppress(ProcessLookupError):
            each.child.replace()


STORAGE_ROUND_S = 2.0
ROOM_BYTES = 32 << 20
"""So much must be free. A restart for less would be followed by the next full disk."""

_COMPLAINT = b"no space left on device"


class StorageWatch:
    """Listens to a NATS server's log."""

    def __init__(self, directory: Path, replace: Callable[[], None]) -> None:
        self._directory = directory
        self._replace = replace
        self._has_complained = False
        self._had_room = False

    def note_line(self, line: bytes) -> None:
        """Take in a line that the server logged."""
        self._has_complained = self._has_complained or _COMPLAINT in line

    def note_round(self, free_bytes: int) -> bool:
        """Take in how much is free at the end of a round; return whether the server complained for no reason."""
        has_room = free_bytes >= ROOM_BYTES
        is_wrong = self._has_complained and self._had_room and has_room
        # A server that was just replaced has a round to complain of what it finds.
        self._had_room = has_room and not is_wrong
        self._has_complained = False
        return is_wrong

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await asyncio.sleep(STORAGE_ROUND_S)
            # Somebody may delete the directory of a running system, which serves people all the same.
            with contextlib.suppress(FileNotFoundError):
                if self.note_round(shutil.disk_usage(self._directory).free):
                    self._replace()
