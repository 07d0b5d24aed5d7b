"""The process that checks untrusted grammars: `python -m shared.grammar.checker_process`.

Each grammar is checked in a limited fork (`shared.limited_process`), because llguidance cannot be interrupted and
overflows its stack on some inputs.

A gateway checks with the vocabulary of single bytes. A worker has a process of its own that compiles for its model's
vocabulary: `gpu_worker.structured_output.compile_check`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

import msgspec

from shared import limited_process
from shared.grammar.check import check_grammar, try_compiling
from shared.grammar.grammar import Grammar, GrammarError
from shared.limited_process import Limits, Outcome, renew_processor_time

CPU_LIMIT_S = 0.1
TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
STACK_BYTES = 6 << 20
"""Less than `COMPILE_STACK_BYTES`: what fits into it here does so everywhere."""
COMPILE_STACK_BYTES = 8 << 20
"""What every thread has that compiles or follows a grammar that was checked."""
LIMITS = Limits(CPU_LIMIT_S, TIME_LIMIT_S, MEMORY_LIMIT_BYTES, STACK_BYTES)
# Streams go first, and tenants whose grammars take long come last.
NICENESS = 5
NICENESS_OF_LONG_ONES = 15

TOO_LONG = "it takes longer to be compiled than is allowed. Make it simpler."
TOO_LARGE = "it needs more memory or depth to be compiled than is allowed. Make it simpler."

Check = Callable[[Grammar], None]
"""Raises `GrammarError` for a grammar that is to be refused. It has `CPU_LIMIT_S`, and what it asks
`renew_processor_time` for."""


class Verdict(msgspec.Struct, frozen=True):
    """Why a grammar is refused, and where in a schema; an empty `reason` if it is not. The check took `cpu_s`."""

    reason: str = ""
    path: str = ""
    cpu_s: float = 0.0

    @classmethod
    def of(cls, outcome: Outcome) -> Verdict:
        """Return what the outcome of a check says."""
        if outcome.content is None:
            return cls(TOO_LONG if outcome.is_late else TOO_LARGE, cpu_s=outcome.cpu_s)
        verdict = msgspec.msgpack.decode(outcome.content, type=cls)
        return msgspec.structs.replace(verdict, cpu_s=outcome.cpu_s)


def checked(check: Check, message: bytes) -> bytes:
    """Return the encoded verdict on an encoded grammar."""
    try:
        check(msgspec.msgpack.decode(message, type=Grammar))
    except GrammarError as error:
        return msgspec.msgpack.encode(Verdict(error.reason, error.path[:512]))
    return msgspec.msgpack.encode(Verdict())


def check_for_bytes(grammar: Grammar) -> None:
    """Check a grammar and compile it for a vocabulary of single bytes."""
    check_grammar(grammar)
    renew_processor_time(CPU_LIMIT_S)
    try_compiling(grammar)


def run(check: Check) -> None:
    """Check grammars until the input ends."""
    # Once, before any fork, which limits this process too.
    check(Grammar(kind="json_schema", source="{}"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    limited_process.run(partial(checked, check), LIMITS)


if __name__ == "__main__":
    run(check_for_bytes)
