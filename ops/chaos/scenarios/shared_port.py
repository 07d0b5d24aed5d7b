"""Two gateway processes share a port, and one stands still: its share goes to the other, and no client hangs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time

import psutil

from ops.chaos import aftermath
from ops.chaos.ledger import Entry
from ops.chaos.load import Load
from ops.chaos.mix import plain_bodies
from ops.chaos.outcome import Outcome, percentile
from ops.chaos.part import Part
from ops.chaos.system import System, SystemOptions

NUM_PROCESSES = 2
NUM_FREEZES = 4
# Too short to be noticed, and in turn with it until the process is killed for it, which is after two seconds.
SHORT_S = 0.6
KILLED_S = 3.5
ANSWER_S = 1.0
_START_TIMEOUT_S = 30.0
_OPTIONS = SystemOptions(num_gateways=1, num_workers=2, gateway={"processes": NUM_PROCESSES})


async def process_frozen(num_requests: int | None) -> Outcome:
    """One of two processes stands still, for a moment or until it is replaced, while clients come to their port.

    Who comes then is answered as ever. Who is connected to it waits until it goes on, or is told by the end of the
    connection when it is killed. `num_requests` are the times that one stands still, `NUM_FREEZES` at most.
    """
    outcome = Outcome("shared-port", f"0 failed, answered in {ANSWER_S:g} s, old ones end in {KILLED_S:g} s")
    spans: list[tuple[float, float]] = []
    async with System(_OPTIONS) as system:
        (gateway,) = system.gateways
        await _until_all_serve(gateway)
        load = Load(system, plain_bodies(40, 8))
        await load.learn_references()
        async with load.going_on(16):
            for number in range(min(num_requests or NUM_FREEZES, NUM_FREEZES)):
                await asyncio.sleep(1.5)
                spans.append(await _freeze_one(gateway, is_short=number % 2 == 0))
            await asyncio.sleep(1.0)
        _judge(outcome, load, spans)
        await aftermath.check(system, load, outcome)
    return outcome


async def _freeze_one(gateway: Part, *, is_short: bool) -> tuple[float, float]:
    """Let a process stand still, for a moment or until its parent has replaced it; return from when to when."""
    victim = _processes(gateway)[0]
    began = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    if is_short:
        await asyncio.sleep(SHORT_S)
        os.kill(victim, signal.SIGCONT)
        return began, time.monotonic()
    async with asyncio.timeout(_START_TIMEOUT_S):
        while psutil.pid_exists(victim):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ended = time.monotonic()
    await _until_all_serve(gateway)
    return began, ended


def _judge(outcome: Outcome, load: Load, spans: list[tuple[float, float]]) -> None:
    waits_s, lives_s = [], []
    for entry in load.ledger.entries:
        for began, ended in spans:
            if began <= entry.sent_at < ended:
                waits_s.append((entry.first_at or math.inf) - entry.sent_at)
            elif _is_open(entry, began):
                lives_s.append((entry.ended_at or math.inf) - began)
                # The one that died had it. It was told so, and in time: see below.
                entry.is_gateway_killed |= entry.is_cut and (entry.ended_at or math.inf) <= began + KILLED_S
    outcome.count(load.ledger, spans)
    outcome.figures["freezes"] = len(spans)
    outcome.figures["came meanwhile"] = len(waits_s)
    outcome.figures["first output p50/p99/max s"] = [percentile(waits_s, share) for share in (0.5, 0.99, 1.0)]
    outcome.figures["those before ended after max s"] = percentile(lives_s, 1.0)
    allowed_s = ANSWER_S + load.max_lag_s
    late = [wait_s for wait_s in waits_s if wait_s > allowed_s]
    outcome.expect(not late, f"{len(late)} of {len(waits_s)} that came meanwhile waited longer than {allowed_s:.1f} s")
    hanging = [life_s for life_s in lives_s if life_s > KILLED_S + load.max_lag_s]
    outcome.expect(not hanging, f"{len(hanging)} of {len(lives_s)} that were open hung for {max(hanging, default=0)} s")


def _is_open(entry: Entry, at: float) -> bool:
    return entry.sent_at < at and (entry.ended_at is None or entry.ended_at > at)


def _processes(gateway: Part) -> list[int]:
    """Return the processes that serve, the oldest first; the gateway itself is their parent."""
    children = psutil.Process(gateway.pid).children()
    return [child.pid for child in sorted(children, key=lambda child: child.create_time()) if _serves(gateway, child)]


def _serves(gateway: Part, child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"pid={child.pid} " in gateway.log and child.status() != psutil.STATUS_ZOMBIE
    return False


async def _until_all_serve(gateway: Part) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S):
        while len(_processes(gateway)) < NUM_PROCESSES:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
