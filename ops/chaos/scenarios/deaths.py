"""Workers and gateways that die, freeze, drain or run out of memory: what they held goes on, or stops and comes back.

Some of the parts may be of an earlier version, as in a rolling update, in both directions. A change of the wire names
the commit before it here, as long as fleets may run it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial

from ops.chaos import aftermath
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Drain, Freeze, Kill, Squeeze
from ops.chaos.ledger import Entry
from ops.chaos.load import Load
from ops.chaos.mix import constrained_bodies, mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.stream_client import ask
from ops.chaos.system import MAX_CONCURRENT, System, SystemOptions

GAP_P99_S = 1.5
# Sixty requests are in line, and the survivor answers six a second: the last one waits ten seconds for a first token.
QUEUED_GAP_P99_S = 12.0
# Times that all workers die in the life of a stream: three were once enough to fail an innocent one.
NUM_WAVES = 3
BACK_S = 5.0
_HOLD_TIMEOUT_S = 30.0
# Before workers had the queue `resumed`.
EARLIER = "cb7d635ac746dfb6d4931f8d3babaa9f7d6fb507"
_EARLIER_PARTS = {
    "earlier-workers": ("worker-0", "worker-1"),
    "earlier-gateway": ("gateway-0",),
    "mixed-workers": ("worker-0",),
}


def _victim(number: int) -> str:
    return f"worker-{number % 3}"


_deaths = partial(
    Disturbance,
    promise="0 failed, p99 <= 1.5 s",
    options=SystemOptions(num_gateways=2, num_workers=3),
    concurrency=32,
    max_silence_p99_s=GAP_P99_S,
)

DEATHS = (
    # One of three workers is killed every other second, under documents and calls that keep to a schema too.
    _deaths(
        "worker-sigkill",
        lambda n: [Kill(0.5, 1.0, _victim(n))],
        bodies=(*mixed_bodies(50), *constrained_bodies(50)),
        num_requests=1500,
    ),
    # One of two workers is killed while four times as many requests wait as can run: no wait is longer than the line.
    Disturbance(
        "worker-sigkill-queue",
        lambda n: [Kill(1.0, 4.0, f"worker-{n % 2}")],
        f"0 failed, p99 <= {QUEUED_GAP_P99_S:g} s",
        SystemOptions(num_gateways=2, num_workers=2, worker={"max_num_seqs": 6}),
        plain_bodies(100, 8),
        concurrency=60,
        num_requests=300,
        max_silence_p99_s=QUEUED_GAP_P99_S,
    ),
    # One of three workers is stopped, for half a second and for six seconds in turn.
    _deaths("worker-sigstop", lambda n: [Freeze(0.5, (0.5, 6.0)[n % 2], (_victim(n),))], num_requests=1500),
    # Rolling restart: one worker after the other drains and comes back.
    _deaths("worker-sigterm", lambda n: [Drain(0.5, 0.2, _victim(n))], num_requests=1000),
    # A worker gets no memory any more for three seconds; then it is killed and comes back.
    _deaths("worker-oom", lambda n: [Squeeze(0.5, 3.0, _victim(n))], num_requests=1000),
    # All workers die at once, again five seconds after they are back: every stream is hit each time, hundreds of tokens
    # apart, and goes on when a worker has started.
    Disturbance(
        "three-deaths",
        lambda n: [Kill(4.0, 1.0, f"worker-{index}") for index in (0, 1)],
        f"0 failed, back + {GAP_P99_S} s",
        SystemOptions(num_workers=2),
        plain_bodies(1400, 8),
        concurrency=8,
        num_requests=8,
        max_recovery_p99_s=GAP_P99_S,
        # It includes three starts of two workers on a busy machine.
        timeout_s=180.0,
        min_faults=2 * NUM_WAVES,
    ),
    # One of two workers is killed, then the other, while some parts are of an earlier version.
    *(
        Disturbance(
            name,
            lambda n: [Kill(1.0, 0.5, f"worker-{n % 2}")],
            options=SystemOptions(num_workers=2, commit_of=dict.fromkeys(parts, EARLIER)),
            bodies=mixed_bodies(60, 8),
            concurrency=12,
            num_requests=300,
        )
        for name, parts in _EARLIER_PARTS.items()
    ),
    # One of three gateways after the other is killed; streams of the others stay whole.
    Disturbance(
        "gateway-sigkill-load",
        lambda n: [Kill(1.0, 1.0, f"gateway-{n % 3}")],
        "0 failed at the others",
        SystemOptions(num_gateways=3, num_workers=2),
        num_requests=1000,
        max_silence_p99_s=1.5,
        queue_timeout_s=aftermath.DEAD_GATEWAY_TIMEOUT_S,
    ),
    # Rolling restart of the gateways: each finishes its streams before it ends.
    Disturbance(
        "gateway-sigterm", lambda n: [Drain(1.0, 0.2, f"gateway-{n % 2}")], num_requests=1000, max_silence_p99_s=1.5
    ),
)


async def sigkill(num_requests: int | None) -> Outcome:
    """A gateway dies with all slots of a key; its sequences stop, and the key gets its slots at the other gateway.

    `num_requests` are the streams that are lost with their gateway: as many at a time as the key has slots.
    """
    outcome = Outcome("gateway-sigkill", f"work stopped and slots back <= {BACK_S:g} s")
    windows, slots_back_s, stopped_after_s = [], [], []
    async with System(SystemOptions(num_gateways=2, num_workers=2)) as system:
        neighbours = Load(system, plain_bodies(300, 4), gateways=("gateway-1",))
        await neighbours.learn_references()
        async with neighbours.going_on(4):
            for _ in range(math.ceil((num_requests or MAX_CONCURRENT) / MAX_CONCURRENT)):
                killed_at, slots_s, stopped_s = await _kill_with_all_slots(system)
                slots_back_s.append(slots_s)
                stopped_after_s.append(stopped_s)
                windows.append((killed_at, time.monotonic()))
                await system.part("gateway-0").revive()
                await asyncio.sleep(1.0)  # it hears the workers
        outcome.count(neighbours.ledger, windows)
        slots_s, stopped_s = max(slots_back_s), max(stopped_after_s)
        outcome.figures |= {"deaths": len(windows), "slots back after s": slots_s, "work stopped after s": stopped_s}
        outcome.expect(slots_s <= BACK_S, f"slots were back after {slots_s} s")
        outcome.expect(stopped_s <= BACK_S, f"the dead gateway's work ran on for {stopped_s} s")
        await aftermath.check(system, neighbours, outcome, queue_timeout_s=aftermath.DEAD_GATEWAY_TIMEOUT_S)
    return outcome


async def _kill_with_all_slots(system: System) -> tuple[float, float, float]:
    """Kill gateway-0 while it streams with all slots of the limited key.

    Returns when, and after how many seconds its slots were free and its sequences had stopped.
    """

    async def has_stopped() -> bool:
        # The neighbours' four streams and the probes of the slots' return are all that may still run.
        return sum(each.running + each.waiting for each in system.observer.live_workers(1.0)) < MAX_CONCURRENT

    entries = [Entry(0, "gateway-0", time.monotonic()) for _ in range(MAX_CONCURRENT)]
    body, port = plain_bodies(1900, 1)[0], system.port("gateway-0")
    holders = [asyncio.create_task(ask(body, port, system.limited_key, entry, 60.0)) for entry in entries]
    async with asyncio.timeout(_HOLD_TIMEOUT_S):
        while not all(entry.first_at for entry in entries):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # heartbeats show them
    killed_at = time.monotonic()
    system.part("gateway-0").kill()
    stopped = asyncio.create_task(_seconds_until(has_stopped, killed_at))
    slots_s = await _seconds_until(lambda: has_all_slots(system), killed_at)
    stopped_s = await stopped
    await asyncio.gather(*holders)
    return killed_at, slots_s, stopped_s


async def has_all_slots(system: System) -> bool:
    """Whether the limited key gets all its slots at the last gateway, at once."""
    gateway = system.gateways[-1].name
    entries = [Entry(0, gateway, time.monotonic()) for _ in range(MAX_CONCURRENT)]
    body = plain_bodies(20, 1)[0]
    await asyncio.gather(*(ask(body, system.port(gateway), system.limited_key, entry, 10.0) for entry in entries))
    return all(entry.status == 200 for entry in entries)


async def _seconds_until(condition: Callable[[], Awaitable[bool]], since: float, timeout_s: float = 90.0) -> float:
    while not await condition() and time.monotonic() - since < timeout_s:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return round(time.monotonic() - since, 2)
