"""The process that checks untrusted grammars: `python -m shared.structured_output.checker_process`.

It reads numbered grammars from its standard input and writes numbered verdicts to its standard output. Each grammar is
checked in a fork of its own with a limit of processor time and of memory, because llguidance cannot be interrupted and
overflows its stack on some inputs. So no grammar can end this process, nor keep it from checking others meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import selectors
import signal
import struct
import sys

import msgspec

from shared.sampling import Grammar
from shared.structured_output.check import check_grammar, try_compiling
from shared.structured_output.errors import GrammarError

CPU_LIMIT_S = 0.1
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
# Streams go first, and tenants whose grammars take long come last.
NICENESS = 5
NICENESS_OF_LONG_ONES = 15

HEAD = struct.Struct("<IIB")
"""The number of a grammar, the length of what follows (the grammar or its verdict), and how nice its check is to be."""

READY = 0
"""The number of the verdict on nothing that says that the process is ready."""

TOO_LONG = f"it takes more than {CPU_LIMIT_S * 1000:.0f} ms to be compiled, which is the most allowed. Make it simpler."
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


def serve(source: int, target: int) -> None:
    """Check grammars until the input ends, each in a fork of its own; the other end says how many at a time."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                fork: _Fork | None = key.data
                if fork is not None:
                    selector.unregister(fork.reading)
                    _write(target, fork.number, _verdict_of(fork))
                elif (message := _read_message(source)) is not None:
                    fork = _begin_check(*message)
                    selector.register(fork.reading, selectors.EVENT_READ, fork)
                else:
                    return


def _read_message(source: int) -> tuple[int, int, bytes] | None:
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


def _begin_check(number: int, niceness: int, message: bytes) -> _Fork:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens here, this fork must not go on with the loop of its parent.
        try:
            os.nice(niceness)
            _limit_this_process()
            grammar = msgspec.msgpack.decode(message, type=Grammar)
            os.write(writing, msgspec.msgpack.encode(_check(grammar)))
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
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    _limit_processor_time()
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)


def _limit_processor_time() -> None:
    """Let the next step begin with all of its time: the check, and then the compilation."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def _check(grammar: Grammar) -> Verdict:
    try:
        check_grammar(grammar)
        _limit_processor_time()
        try_compiling(grammar)
    except GrammarError as error:
        return Verdict(error.reason, error.path[:512])
    except (MemoryError, RecursionError):
        return Verdict(TOO_LARGE)
    return Verdict()


def main() -> None:
    """Serve on the standard streams."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent closes the input when it is done; a Ctrl-C in its terminal is for the parent.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    # Once, before any fork.
    assert importlib.util.find_spec("llguidance") is not None
    check_grammar(Grammar(kind="json_schema", source="{}"))
    source, target = sys.stdin.fileno(), sys.stdout.fileno()
    _write(target, READY, Verdict())
    serve(source, target)


if __name__ == "__main__":
    main()
