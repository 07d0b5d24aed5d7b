"""A process that works on what strangers send: each piece in a fork of its own with limits of time, memory and stack.

It reads numbered pieces of work from its standard input and writes numbered outcomes to its standard output. No piece
can end this process, or keep it from working on others meanwhile: what a library cannot be interrupted at, or crashes
on, ends a fork. The other end, `shared.limited_link`, says how many are worked on at once.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

HEAD = struct.Struct("<IIB")
"""The number of a piece, the length of what follows (the work or its outcome), and how nice its fork is to be."""

# Work that is ended by the clock without this share of its time on a processor has waited for one.
_LEAST_SHARE = 0.5
READY = 0
"""The number of the outcome of nothing that says that the process is ready."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one piece of work.

    Attributes:
        cpu_s: Processor time, in seconds.
        time_s: Time until it is ended, in seconds.
        memory_bytes: Beside what the process has before it.
        stack_bytes: Of the thread that works.
    """

    cpu_s: float
    time_s: float
    memory_bytes: int
    stack_bytes: int


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a piece of work.

    Attributes:
        content: The returned bytes; None if its limits, or a crash, ended it.
        is_late: It was ended because of its time.
        cpu_s: Seconds of processor time that it took.
        is_interrupted: The system, or somebody else, ended it, or the processors were busy with other things for most
            of its time: that says nothing of the work.
    """

    content: bytes | None = None
    is_late: bool = False
    cpu_s: float = 0.0
    is_interrupted: bool = False


Work = Callable[[bytes], bytes]


def run(work: Work, limits: Limits) -> None:
    """Say that this process is ready, and serve on its standard streams until the input ends.

    `work` returns what a piece comes to; its `MemoryError` and `RecursionError` count as limits.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent closes the input when it is done; a Ctrl-C in its terminal is for the parent.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    _write(target, READY, Outcome(b""))
    serve(source, target, work, limits)


def serve(source: int, target: int, work: Work, limits: Limits) -> None:
    """Work on what `source` has until it ends, each piece in a fork, and write outcomes to `target`."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                fork: Fork | None = key.data
                if fork is not None:
                    selector.unregister(fork.reading)
                    _write(target, fork.number, outcome_of(fork))
                elif (message := read_message(source)) is not None:
                    fork = begin(*message, work, limits)
                    selector.register(fork.reading, selectors.EVENT_READ, fork)
                else:
                    return


def read_message(source: int) -> tuple[int, int, bytes] | None:
    """Return the next number, niceness and piece of work; None at the end of the input."""
    head = _read_exactly(source, HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, length, niceness = HEAD.unpack(head)
    return number, niceness, _read_exactly(source, length)


def _read_exactly(source: int, count: int) -> bytes:
    """Return `count` bytes, or fewer at the end of the input."""
    content = bytearray()
    while len(content) < count and (part := os.read(source, count - len(content))):
        content += part
    return bytes(content)


def _write(target: int, number: int, outcome: Outcome) -> None:
    encoded = msgspec.msgpack.encode(outcome)
    waiting = HEAD.pack(number, len(encoded), 0) + encoded
    while waiting:
        waiting = waiting[os.write(target, waiting) :]


@dataclass(frozen=True, slots=True)
class Fork:
    """Work that runs: its number, its process, where that writes what it comes to, and how long it may take."""

    number: int
    process: int
    reading: int
    time_s: float


def begin(number: int, niceness: int, message: bytes, work: Work, limits: Limits) -> Fork:
    """Begin a piece of work in a fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens here, this fork must not go on with the loop of its parent.
        try:
            os.close(reading)
            os.nice(niceness)
            _limit_this_process(limits)
            with open(writing, "wb") as answer:
                answer.write(msgspec.msgpack.encode(_with_own_stack(work, message, limits.stack_bytes)))
        finally:
            os._exit(0)
    os.close(writing)
    return Fork(number, child, reading, limits.time_s)


def outcome_of(fork: Fork) -> Outcome:
    """Wait for work that has written what it comes to, or has ended without."""
    with open(fork.reading, "rb") as answer:
        encoded = answer.read()
    _, status, usage = os.wait4(fork.process, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    if encoded:
        outcome = msgspec.msgpack.decode(encoded, type=Outcome)
    else:
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        has_starved = ended_by == signal.SIGALRM and cpu_s < _LEAST_SHARE * fork.time_s
        # None of the limits ends a process by the latter two: a kernel out of memory does, or an operator.
        outcome = Outcome(
            is_late=ended_by in (signal.SIGPROF, signal.SIGALRM) and not has_starved,
            is_interrupted=has_starved or ended_by in (signal.SIGKILL, signal.SIGTERM),
        )
    return msgspec.structs.replace(outcome, cpu_s=cpu_s)


def _limit_this_process(limits: Limits) -> None:
    """Let the kernel end this process when it has used its time or memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Whatever the process that forked did with them.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    renew_processor_time(limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.time_s)


def _address_space_bytes() -> int:
    """Return what this process has of addresses; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def renew_processor_time(limit_s: float) -> None:
    """Let the next step of a piece of work begin with all of its time."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def _with_own_stack(work: Work, message: bytes, stack_bytes: int) -> Outcome:
    """Return what `work` comes to in a thread of `stack_bytes`, whatever the stack of this process is."""
    outcomes: list[Outcome] = []

    def worked() -> None:
        try:
            outcomes.append(Outcome(work(message)))
        except (MemoryError, RecursionError):
            outcomes.append(Outcome())

    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=worked)
    thread.start()
    thread.join()
    return outcomes[0]
