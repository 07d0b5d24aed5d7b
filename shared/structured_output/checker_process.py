"""The process that checks grammars of strangers: `python -m shared.structured_output.checker_process`.

It reads grammars from its standard input and writes verdicts to its standard output, one after the other. Each grammar
is checked in a fork of its own with a limit of processor time and of memory, because llguidance cannot be interrupted
and overflows its stack on some inputs. So no grammar can end this process, nor keep it.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from shared.sampling import Grammar
from shared.structured_output.check import check_grammar, try_compiling
from shared.structured_output.errors import GrammarError

CPU_LIMIT_S = 0.1
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
# Streams go first.
NICENESS = 10

LENGTH = struct.Struct("<I")

TOO_LONG = f"it takes more than {CPU_LIMIT_S * 1000:.0f} ms to be compiled, which is the most allowed. Make it simpler."
TOO_LARGE = "it needs more memory or depth to be compiled than is allowed. Make it simpler."


class Verdict(msgspec.Struct, frozen=True):
    """Why a grammar is refused; an empty `reason` if it is not. `path` says where in a schema."""

    reason: str = ""
    path: str = ""


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Check grammars until the input ends."""
    decode = msgspec.msgpack.Decoder(Grammar).decode
    while (grammar := read_message(source)) is not None:
        verdict = msgspec.msgpack.encode(_check_in_fork(decode(grammar)))
        target.write(LENGTH.pack(len(verdict)) + verdict)
        target.flush()


def read_message(source: BinaryIO) -> bytes | None:
    """Return the next message; None at the end of the input."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return source.read(LENGTH.unpack(head)[0])


def _check_in_fork(grammar: Grammar) -> Verdict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever happens here, this fork must not go on with the loop of its parent.
        try:
            os.close(reading)
            _limit_this_process()
            os.write(writing, msgspec.msgpack.encode(_check(grammar)))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        encoded = answer.read()
    _, status = os.waitpid(child, 0)
    if encoded:
        return msgspec.msgpack.decode(encoded, type=Verdict)
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
    return Verdict(TOO_LONG if is_late else TOO_LARGE)


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
    os.nice(NICENESS)
    # Once, before any fork.
    assert importlib.util.find_spec("llguidance") is not None
    check_grammar(Grammar(kind="json_schema", source="{}"))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
