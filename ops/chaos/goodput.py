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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ops.bench.load.processes import cpu_seconds
from ops.chaos.ledger import Entry, Ledger, Verdict
from ops.chaos.load import Load
from ops.chaos.observer import Seen
from ops.chaos.system import System

_SAMPLE_S = 0.05
_WARM_UP_S = 3.0


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


async def measure(
    load: Load, system: System, running: Coroutine[Any, Any, None], num_slots: int, span_s: float
) -> Goodput:
    """Run a load on one worker of `num_slots` sequences until it was measured for a span in a steady state."""
    task = asyncio.create_task(running)
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
    load.stop()
    await task
    return Goodput(tokens_within(load.ledger, began, ended) / (ended - began), possible_per_s(seen, num_slots), others)


def tokens_within(ledger: Ledger, began: float, ended: float) -> float:
    """Return the tokens of right answers that came within a span, which begins and ends within answers."""
    right = [entry for entry in ledger.entries if ledger.verdict(entry) is Verdict.OK]
    return sum(_tokens_within(entry, began, ended) for entry in right)


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
    """Return the processor time that all processes of this machine have used."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)


def _cpu_s(system: System) -> float:
    """Return the processor time of this process and of the system's parts."""
    return cpu_seconds([os.getpid(), *(part.pid for part in system.parts)])
