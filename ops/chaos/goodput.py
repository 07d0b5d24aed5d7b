"""Goodput beside what the machine could do in the same seconds.

A capacity that was measured a minute ago is that of another machine where others use the processors: beside four
processes that only burn CPU a worker made half as many steps, with the same seven to eight of its eight slots in use.
So the tokens of right answers are compared with what the worker's own steps could have made in these seconds: all slots
in each of them, and no pause between them. How much of the processors others used is measured too: with little of it,
the capacity of a minute ago holds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.chaos.ledger import Entry, Ledger, Verdict
from ops.chaos.observer import Seen
from ops.chaos.system import System

_SAMPLE_S = 0.05
_WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True)
class Span:
    """What was measured of a worker and its machine within a span.

    Attributes:
        began, ended: Monotonic times.
        possible_per_s: Tokens that the worker could have made.
        others: Share of the processors that processes used which are not of this scenario.
    """

    began: float
    ended: float
    possible_per_s: float
    others: float

    def goodput(self, ledger: Ledger) -> Goodput:
        """Return what came of a load within the span, once all that was under way at its end has ended."""
        right = [entry for entry in ledger.entries if ledger.verdict(entry) is Verdict.OK]
        num_tokens = sum(_tokens_within(entry, self.began, self.ended) for entry in right)
        return Goodput(num_tokens / (self.ended - self.began), self.possible_per_s, self.others)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What came of a load within a span.

    Attributes:
        tokens_per_s: Tokens of right answers.
        possible_per_s: Tokens that the worker could have made.
        others: Share of the processors that processes used which are not of this scenario.
    """

    tokens_per_s: float
    possible_per_s: float
    others: float

    @property
    def share(self) -> float:
        """Share of the possible."""
        return self.tokens_per_s / max(1e-9, self.possible_per_s)


async def measure(system: System, num_slots: int, span_s: float) -> Span:
    """Measure the one worker that serves a load that runs already, when it has become steady."""
    await asyncio.sleep(_WARM_UP_S)
    (name,) = system.observer.workers
    own_s, all_s = _cpu_s(system), _machine_cpu_s()
    seen = [system.observer.workers[name]]
    began = time.monotonic()
    while time.monotonic() < began + span_s:
        await asyncio.sleep(_SAMPLE_S)
        if system.observer.workers[name].at > seen[-1].at:
            seen.append(system.observer.workers[name])
    ended = time.monotonic()
    others_s = (_machine_cpu_s() - all_s) - (_cpu_s(system) - own_s)
    others = max(0.0, others_s) / ((ended - began) * (os.cpu_count() or 1))
    return Span(began, ended, possible_per_s(seen, num_slots), others)


def possible_per_s(seen: Sequence[Seen], num_slots: int) -> float:
    """Return the tokens per second of a worker whose steps have all slots, and that makes them without a pause.

    Args:
        seen: Its heartbeats, at even distances.
        num_slots: How many sequences a step may have.
    """
    busy = sum(each.heartbeat.running > 0 for each in seen) / len(seen)
    span_s = seen[-1].at - seen[0].at
    num_steps = seen[-1].heartbeat.step - seen[0].heartbeat.step
    return num_slots * num_steps / span_s / busy if busy and span_s else 0.0


def _tokens_within(entry: Entry, began: float, ended: float) -> float:
    """Return the part of an answer's tokens that came within a span.

    Answers that are made together end together: whether the span had one more such end or one less would count for
    one in thirty.
    """
    if entry.first_at is None or entry.last_at is None or entry.completion_tokens is None:
        return 0.0
    within_s = min(entry.last_at, ended) - max(entry.first_at, began)
    share = within_s / (entry.last_at - entry.first_at) if entry.last_at > entry.first_at else float(within_s >= 0)
    return entry.completion_tokens * max(0.0, share)


def _machine_cpu_s() -> float:
    """Return the processor time that anybody has used on this machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, kernel, _idle, _iowait, interrupts, soft_interrupts, stolen = fields
    return (user + nice + kernel + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _cpu_s(system: System) -> float:
    """Return the processor time of this process and of the system's parts."""
    times = os.times()
    used_s = times.user + times.system
    for part in system.parts:
        # What follows the name in parentheses, which may hold anything.
        fields = Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()
        used_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used_s
