"""The process that checks untrusted grammars: `python -m shared.grammar.checker_process`.

It reads numbered grammars from its standard input and writes numbered verdicts to its standard output. Each grammar is
checked in a fork of its own with limits of processor time, memory and stack, because llguidance cannot be interrupted
and overflows its stack on some inputs. So no grammar can end this process, nor keep it from checking others meanwhile.

A gateway checks with the vocabulary of single bytes. A worker has a process of its own that compiles for its model's
vocabulary: `gpu_worker.structured_output.compile_check`.
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

import msgspec

from shared.grammar.check import check_grammar, try_compiling
from shared.grammar.grammar import Grammar, GrammarError

CPU_LIMIT_S = 0.1
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
"""What a check may need beside what the process has before it."""
STACK_BYTES = 6 << 20
"""Less than `COMPILE_STACK_BYTES`: what fits into it here does so everywhere."""
COMPILE_STACK_BYTES = 8 << 20
"""What every thread has that compiles or follows a grammar that was checked."""
# Streams go first, and tenants whose grammars take long come last.
NICENESS = 5
NICENESS_OF_LONG_ONES = 15

HEAD = struct.Struct("<IIB")
"""The number of a grammar, the length of what follows (the grammar or its verdict), and how nice its check is to be."""

READY = 0
"""The number of the verdict on nothing that says that the process is ready."""

TOO_LONG = "it takes longer to be compiled than is allowed. Make it simpler."
TOO_LARGE = "it needs more memory or depth to be compiled than is allowed. Make it simpler."


class Verdict(msgspec.Struct, frozen=True):
    """Why a grammar is refused; an empty `reason` if it is not.

    Attributes:
        path: Where in a schema.
        cpu_s: Seconds of processor time that the check took.
    """

    reason: str = ""
    path: str = ""
    cpu_s: float = 0.0


def serve(source: int, target: int, check: Callable[[Grammar], None]) -> None:
    """Check grammars until the input ends, each in a fork of its own; the other end says how many at a time.

    Args:
        source: Where grammars come from.
        target: Where verdicts go.
        check: Raises `GrammarError` for a grammar that is to be refused. It has `CPU_LIMIT_S`, and what it asks
            `renew_processor_time` for.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                fork: _Fork | None = key.data
                if fork is not None:
                    selector.unregister(fork.reading)
                    _write(target, fork.number, _verdict_of(fork))
                elif (message := read_message(source)) is not None:
                    fork = _begin_check(*message, check)
                    selector.register(fork.reading, selectors.EVENT_READ, fork)
                else:
                    return


def read_message(source: int) -> tuple[int, int, bytes] | None:
    """Return the next number, niceness and grammar; None at the end of the input."""
    head = _read_exactly(source, HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, length, niceness = HEAD.unpack(head)
    return number, niceness, _read_exactly(source, length)


def _read_exactly(source: int, count: int) -> bytes:
    """Return `count` bytes, or fewer at the end of the input."""
    content = b""
    while len(content) < count and (part := os.read(source, count - len(content))):
        content += part
    return content


def _write(target: int, number: int, verdict: Verdict) -> None:
    encoded = msgspec.msgpack.encode(verdict)
    waiting = HEAD.pack(number, len(encoded), 0) + encoded
    while waiting:
        waiting = waiting[os.write(target, waiting) :]


class _Fork(msgspec.Struct, frozen=True):
    """A check that runs: the number of its grammar, its process, and where that writes the verdict."""

    number: int
    process: int
    reading: int


def _begin_check(number: int, niceness: int, message: bytes, check: Callable[[Grammar], None]) -> _Fork:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens here, this fork must not go on with the loop of its parent.
        try:
            os.nice(niceness)
            _limit_this_process()
            grammar = msgspec.msgpack.decode(message, type=Grammar)
            os.write(writing, msgspec.msgpack.encode(_with_own_stack(lambda: _checked(grammar, check))))
        finally:
            os._exit(0)
    os.close(writing)
    return _Fork(number, child, reading)


def _verdict_of(fork: _Fork) -> Verdict:
    """Wait for a check that has written its verdict, or ended without one."""
    with open(fork.reading, "rb") as answer:
        encoded = answer.read()
    _, status, usage = os.wait4(fork.process, 0)
    if encoded:
        verdict = msgspec.msgpack.decode(encoded, type=Verdict)
    else:
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
        verdict = Verdict(TOO_LONG if is_late else TOO_LARGE)
    return msgspec.structs.replace(verdict, cpu_s=usage.ru_utime + usage.ru_stime)


def _limit_this_process() -> None:
    """Let the kernel end this process when it has used its time or memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space_bytes() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Whatever the process that forked did with them.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    renew_processor_time()
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)


def _address_space_bytes() -> int:
    """Return what this process has of addresses; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def renew_processor_time(limit_s: float = CPU_LIMIT_S) -> None:
    """Let the next step of a check begin with all of its time."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def _with_own_stack(check: Callable[[], Verdict]) -> Verdict:
    """Return what `check` returns in a thread of `STACK_BYTES`, whatever the stack of this process is."""
    verdicts: list[Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(check()))
    thread.start()
    thread.join()
    return verdicts[0]


def _checked(grammar: Grammar, check: Callable[[Grammar], None]) -> Verdict:
    try:
        check(grammar)
    except GrammarError as error:
        return Verdict(error.reason, error.path[:512])
    except (MemoryError, RecursionError):
        return Verdict(TOO_LARGE)
    return Verdict()


def check_for_bytes(grammar: Grammar) -> None:
    """Check a grammar and compile it for a vocabulary of single bytes.

    Raises:
        GrammarError: It is refused.
    """
    check_grammar(grammar)
    renew_processor_time()
    try_compiling(grammar)


def run(check: Callable[[Grammar], None]) -> None:
    """Say that this process is ready, and serve on its standard streams."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent closes the input when it is done; a Ctrl-C in its terminal is for the parent.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    # Once, before any fork, which limits this process too.
    check(Grammar(kind="json_schema", source="{}"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    _write(target, READY, Verdict())
    serve(source, target, check)


if __name__ == "__main__":
    run(check_for_bytes)
