"""NATS and Redis that die, freeze, or cannot be reached; and a pause of everything at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ops.chaos import aftermath, disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import Fault, Freeze, Kill, Sever
from ops.chaos.ledger import Entry
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome, percentile
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System, SystemOptions

_OPTIONS = SystemOptions(num_gateways=2, num_workers=2)
_WITH_LINKS = replace(_OPTIONS, has_faulty_links=True)
PARTITION_S = 10.0
RECOVERY_S = 1.0
REFUSAL_S = 0.1
# A gateway suspects NATS after a second of silence; whoever has asked until then is refused when it does.
SUSPICION_S = 1.1
ASKING_INTERVAL_S = 0.1
MAX_PARTITIONED = 64
# NATS gives a client up after three pings of two seconds.
FROZEN_S = 12.0
WAKING_S = 5.0


async def nats_restart(num_requests: int | None) -> Outcome:
    """NATS is killed and comes back half a second later without the interactive queue, which lives in memory."""
    return await _disturbed(
        "nats-restart",
        "0 failed, 1 s after it heals",
        lambda n: [Kill(3.0, 0.5, "nats")],
        2.0,
        num_requests or 800,
        max_recovery_p99_s=RECOVERY_S,
    )


async def nats_freezes(num_requests: int | None) -> Outcome:
    """Three pauses of NATS of two seconds each, while nobody is dead, under long streams."""
    schedule: Sequence[Fault] = [Freeze(at, 2.0, ("nats",)) for at in (1.0, 5.0, 9.0)]
    return await _once("nats-freezes", "0 failed, pause + 1 s", schedule, 3.0)


async def pause_of_everything(num_requests: int | None) -> Outcome:
    """The host stands still for seven seconds: every process at once."""
    parts = ("gateway-0", "gateway-1", "worker-0", "worker-1", "nats", "redis")
    return await _once("pause-of-everything", "0 failed, pause + 1 s", [Freeze(1.0, 7.0, parts)], 8.0)


async def pause_of_workers(num_requests: int | None) -> Outcome:
    """All workers stand still for seven seconds; gateways and servers go on."""
    return await _once("pause-of-workers", "0 failed", [Freeze(1.0, 7.0, ("worker-0", "worker-1"))], None)


async def pause_of_gateways(num_requests: int | None) -> Outcome:
    """All gateways stand still for seven seconds; workers and servers go on."""
    return await _once("pause-of-gateways", "0 failed", [Freeze(1.0, 7.0, ("gateway-0", "gateway-1"))], 8.5)


async def gateway_frozen(num_requests: int | None) -> Outcome:
    """A gateway stands still for so long that NATS gives it up; whoever asks meanwhile is answered when it wakes up."""
    outcome = Outcome("gateway-frozen", f"0 refused, {WAKING_S:g} s after it wakes up")
    async with System(replace(_OPTIONS, num_gateways=1)) as system:
        load = Load(system, plain_bodies(30, 4))
        await load.learn_references()
        gateway = system.gateways[0]
        gateway.freeze()
        asking = asyncio.create_task(load.run_open(5.0, FROZEN_S + 1.0))
        await asyncio.sleep(FROZEN_S)
        gateway.thaw()
        woken_at = time.monotonic()
        await asking
        outcome.count(load.ledger, [])
        outcome.expect(outcome.num_refused == 0, f"{outcome.num_refused} requests were refused")
        late_s = max((entry.ended_at or math.inf) - max(entry.sent_at, woken_at) for entry in load.ledger.entries)
        outcome.figures["last answer after s"] = round(late_s, 2)
        outcome.expect(late_s <= WAKING_S, f"an answer took {late_s:.1f} s after the gateway had woken up")
        await aftermath.check(system, load, outcome)
    return outcome


async def redis_faults(num_requests: int | None) -> Outcome:
    """Redis is frozen, killed, slow and cut off in turn; nobody notices."""

    def schedule(number: int) -> Sequence[Fault]:
        kinds: list[Fault] = [
            Freeze(0.2, 2.0, ("redis",)),
            Kill(0.2, 1.0, "redis"),
            Sever(0.2, 1.5, LinkState.SLOW, "redis"),
            Sever(0.2, 1.5, LinkState.CUT, "redis"),
        ]
        return [kinds[number % len(kinds)]]

    return await _disturbed(
        "redis-faults", "0 failed, no silence", schedule, 0.5, num_requests or 800, options=_WITH_LINKS
    )


async def worker_link_faults(num_requests: int | None) -> Outcome:
    """The link between one worker and NATS is partitioned, passes one way only, is cut and is slow in turn."""
    states = (LinkState.PARTITIONED, LinkState.HALF_OPEN, LinkState.MUTE, LinkState.CUT, LinkState.SLOW)
    return await _disturbed(
        "worker-link-faults",
        "0 failed, p99 <= 1.5 s",
        lambda n: [Sever(0.5, 3.0, states[n % len(states)], "nats", f"worker-{n // len(states) % 2}")],
        1.5,
        num_requests or 1200,
        options=_WITH_LINKS,
    )


async def nats_partition(num_requests: int | None) -> Outcome:
    """Nobody reaches NATS for ten seconds: what runs goes on afterwards, what is new is refused.

    Those who ask before NATS can be suspected are refused when it is, all others at once. `num_requests` are the
    streams that run when it begins, `MAX_PARTITIONED` at most.
    """
    bodies = plain_bodies(600, min(num_requests or 8, MAX_PARTITIONED))
    outcome = Outcome("nats-partition", "healed + 1 s; refused in 1.1 s, then <= 0.1 s")
    async with System(_WITH_LINKS) as system:
        partition = Sever(1.0, PARTITION_S, LinkState.PARTITIONED, "nats")
        refusing = asyncio.create_task(_ask_during_partition(system))
        outcome = await disturbance.run_on(
            system,
            Disturbance(
                outcome.case,
                outcome.promise,
                _WITH_LINKS,
                bodies,
                lambda n: [partition],
                concurrency=len(bodies),
                max_silence_p99_s=PARTITION_S + RECOVERY_S,
                max_recovery_p99_s=RECOVERY_S,
            ),
        )
        refusals = await refusing
    _judge_refusals(outcome, refusals)
    return outcome


@dataclass
class _Refusals:
    """What was asked during a partition: when it began, the answers, and by how much we asked too late ourselves."""

    began: float
    answers: list[Entry]
    max_lag_s: float = 0.0


def _judge_refusals(outcome: Outcome, refusals: _Refusals) -> None:
    began, answers = refusals.began, refusals.answers
    # A process that asks later than it wanted to also hears the answers later than they came.
    allowed_s = REFUSAL_S + refusals.max_lag_s
    statuses = {entry.status for entry in answers}
    outcome.expect(statuses == {503}, f"new requests were answered {statuses}, not with a 503")
    outcome.expect(all(entry.retry_after_s for entry in answers), "a refusal had no Retry-After")
    ended = [(entry.sent_at - began, (entry.ended_at or math.inf) - entry.sent_at) for entry in answers]
    early = [at_s + wait_s for at_s, wait_s in ended if at_s <= SUSPICION_S]
    waits_s = [wait_s for at_s, wait_s in ended if at_s > SUSPICION_S]
    outcome.figures["refusals"] = len(answers)
    outcome.figures["asked too late by s"] = round(refusals.max_lag_s, 3)
    outcome.figures["first refusals after s"] = (percentile(early, 0.0), percentile(early, 1.0))
    outcome.figures["later refusals p50/p99/max s"] = [percentile(waits_s, share) for share in (0.5, 0.99, 1.0)]
    late = [end_s for end_s in early if end_s > SUSPICION_S + allowed_s]
    outcome.expect(not late, f"{len(late)} of the first {len(early)} were not refused {SUSPICION_S:g} s after it began")
    slow = [wait_s for wait_s in waits_s if wait_s > allowed_s]
    outcome.expect(not slow, f"{len(slow)} of {len(waits_s)} later requests waited longer than {allowed_s:.2f} s")


async def _ask_during_partition(system: System) -> _Refusals:
    """Ask new requests from the beginning of the partition nearly to its end."""
    while not any(link.state is LinkState.PARTITIONED for link in system.links.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    refusals = _Refusals(time.monotonic(), [])
    body = plain_bodies(4, 1)[0]
    async with asyncio.TaskGroup() as asking:
        # What was on its way when it began may have arrived, and is answered when it has healed.
        for number in range(1, round((PARTITION_S - 1.0) / ASKING_INTERVAL_S)):
            due = refusals.began + number * ASKING_INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            gateway = system.gateways[number % len(system.gateways)].name
            entry = Entry(0, gateway, time.monotonic())
            refusals.max_lag_s = max(refusals.max_lag_s, entry.sent_at - due)
            refusals.answers.append(entry)
            asking.create_task(ask(body, system.port(gateway), API_KEY, entry, PARTITION_S))
    return refusals


async def _once(case: str, promise: str, schedule: Sequence[Fault], max_silence_p99_s: float | None) -> Outcome:
    """Long streams, and one round of a schedule."""
    return await disturbance.run(
        Disturbance(
            case,
            promise,
            _OPTIONS,
            [*plain_bodies(700, 6), *mixed_bodies(60, 8)],
            lambda n: schedule,
            concurrency=14,
            max_silence_p99_s=max_silence_p99_s,
        )
    )


async def _disturbed(
    case: str,
    promise: str,
    schedule: Callable[[int], Sequence[Fault]],
    max_silence_p99_s: float,
    num_requests: int,
    options: SystemOptions = _OPTIONS,
    max_recovery_p99_s: float | None = None,
) -> Outcome:
    return await disturbance.run(
        Disturbance(
            case,
            promise,
            options,
            mixed_bodies(50),
            schedule,
            num_requests=num_requests,
            max_silence_p99_s=max_silence_p99_s,
            max_recovery_p99_s=max_recovery_p99_s,
        )
    )
