"""NATS and Redis that die, freeze or cannot be reached, links with all kinds of faults, and a wall clock that jumps."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ops.chaos import aftermath, disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import Fault, FaultLog, Freeze, Jump, Kill, Sever
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome, percentile, spread
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System, SystemOptions

PARTITION_S = 10.0
ONE_WAY_S = 8.0
RECOVERY_S = 1.0
REFUSAL_S = 0.1
MAX_PARTITIONED = 64
# After a second of silence NATS is suspected; a NATS that is heard, and does not answer, after two and a half.
SUSPECTED_S = {LinkState.PARTITIONED: 1.1, LinkState.HALF_OPEN: 1.2, LinkState.MUTE: 2.7}
NARROW_S = 15.0
# Two seconds until a link is known to be too narrow, and time for what it still has to carry for admitted requests.
NARROW_SILENCE_S = 5.0
_ASKING_INTERVAL_S = 0.1
_HOUR_S = 3600
_WITH_LINKS = SystemOptions(num_gateways=2, num_workers=2, has_faulty_links=True)
_WORKER_LINK = (LinkState.PARTITIONED, LinkState.HALF_OPEN, LinkState.MUTE, LinkState.CUT, LinkState.SLOW)
_REDIS: tuple[Fault, ...] = (
    Freeze(0.2, 2.0, ("redis",)),
    Kill(0.2, 1.0, "redis"),
    Sever(0.2, 1.5, LinkState.SLOW, "redis"),
    Sever(0.2, 1.5, LinkState.CUT, "redis"),
)

SERVER_FAULTS = (
    # NATS is killed and comes back half a second later without the interactive queue, which lives in memory.
    Disturbance(
        "nats-restart",
        lambda n: [Kill(3.0, 0.5, "nats")],
        "0 failed, 1 s after it heals",
        num_requests=800,
        max_silence_p99_s=2.0,
        max_recovery_p99_s=RECOVERY_S,
    ),
    # Redis is frozen, killed, slow and cut off in turn.
    Disturbance(
        "redis-faults",
        lambda n: [_REDIS[n % len(_REDIS)]],
        "0 failed, no silence",
        _WITH_LINKS,
        num_requests=800,
        max_silence_p99_s=0.5,
    ),
    # The link between one worker and NATS is partitioned, passes one way only, is cut and is slow in turn.
    Disturbance(
        "worker-link-faults",
        lambda n: [Sever(0.5, 3.0, _WORKER_LINK[n % 5], "nats", f"worker-{n // 5 % 2}")],
        "0 failed, p99 <= 1.5 s",
        _WITH_LINKS,
        num_requests=1200,
        max_silence_p99_s=1.5,
    ),
    # One of two gateways, then one of two workers, has 20 kB/s to NATS, a fraction of what it sends. Late messages are
    # not lost: sent once more, they would only take the place of those to come.
    Disturbance(
        "narrow-links",
        lambda n: [
            Sever(1.0, NARROW_S, LinkState.NARROW, "nats", "gateway-0"),
            Sever(5.0 + NARROW_S, NARROW_S, LinkState.NARROW, "nats", "worker-0"),
        ],
        f"0 failed, p99 <= {NARROW_SILENCE_S:g} s",
        replace(_WITH_LINKS, link_bytes_per_s=20_000),
        max_silence_p99_s=NARROW_SILENCE_S,
        false_alarm="the connection to NATS is lost",
    ),
    # The wall clock of gateways and workers jumps an hour forward and back, then an hour back and forward.
    Disturbance(
        "clock-jump",
        lambda n: [Jump(1.0, 1.5, _HOUR_S if n % 2 == 0 else -_HOUR_S)],
        "0 failed, no silence",
        SystemOptions(num_workers=2, has_movable_clock=True),
        num_requests=600,
        max_silence_p99_s=1.5,
    ),
)


async def nats_partition(num_requests: int | None) -> Outcome:
    """NATS cannot be reached for ten seconds: running requests continue afterwards, new ones are refused.

    Requests that come before the gateway suspects NATS are refused once it does, all later ones at once. `num_requests`
    streams run when the fault begins, `MAX_PARTITIONED` at most.
    """
    bodies = plain_bodies(600, min(num_requests or 8, MAX_PARTITIONED))
    async with System(_WITH_LINKS) as system:
        names = [gateway.name for gateway in system.gateways]
        asking = asyncio.create_task(_ask_meanwhile(system, LinkState.PARTITIONED, PARTITION_S, names))
        outcome = await disturbance.run_on(
            system,
            Disturbance(
                "nats-partition",
                lambda n: [Sever(1.0, PARTITION_S, LinkState.PARTITIONED, "nats")],
                "healed + 1 s; refused in 1.1 s, then <= 0.1 s",
                _WITH_LINKS,
                bodies,
                concurrency=len(bodies),
                max_silence_p99_s=PARTITION_S + RECOVERY_S,
                max_recovery_p99_s=RECOVERY_S,
            ),
        )
        _judge_refusals(outcome, LinkState.PARTITIONED, await asking)
    return outcome


async def one_way_links(num_requests: int | None) -> Outcome:
    """The link between a gateway and NATS passes one way only, first one, then the other.

    Running requests continue once the link is restored, new ones are refused. The other gateway is unaffected.
    """
    promise = f"0 failed; refused in {max(SUSPECTED_S.values())} s; mended + {RECOVERY_S:g} s"
    outcome, beside = Outcome("one-way-links", promise), Outcome("", "")
    async with System(_WITH_LINKS) as system:
        cut_off = Load(system, plain_bodies(300, 6), gateways=("gateway-0",))
        others = Load(system, mixed_bodies(50, 8), gateways=("gateway-1",))
        for load in (cut_off, others):
            await load.learn_references()
        log = FaultLog()
        async with cut_off.going_on(8), others.going_on(8):
            for state in (LinkState.MUTE, LinkState.HALF_OPEN):
                await asyncio.sleep(2.0)
                asking = asyncio.create_task(_ask_meanwhile(system, state, ONE_WAY_S, ["gateway-0"]))
                await log.run(system, [Sever(0.0, ONE_WAY_S, state, "nats", "gateway-0")])
                _judge_refusals(outcome, state, await asking)
            await asyncio.sleep(2.0)
        outcome.count(cut_off.ledger, log.windows)
        recovery_s = percentile(outcome.recoveries_s, 0.99) or 0.0
        outcome.figures["silent after it was mended p99 s"] = recovery_s
        outcome.expect(recovery_s <= RECOVERY_S, f"streams were silent for {recovery_s:.2f} s after it was mended")
        beside.count(others.ledger, log.windows)
        silence_s = percentile(beside.silences_s, 0.99) or 0.0
        outcome.figures["silence at the other gateway p99 s"] = silence_s
        beside.expect(silence_s <= 1.5, f"streams were silent for {silence_s:.2f} s")
        outcome.problems += [f"at the other gateway: {problem}" for problem in beside.problems]
        outcome.num_requests += beside.num_requests
        outcome.num_failed += beside.num_failed
        outcome.num_wrong += beside.num_wrong
        await aftermath.check(system, others, outcome)
    return outcome


@dataclass
class _Asked:
    """New requests during a fault: when it began, the answers, and the longest delay of this process in asking."""

    began: float
    answers: list[Entry] = field(default_factory=list)
    max_lag_s: float = 0.0


async def _ask_meanwhile(system: System, state: LinkState, span_s: float, gateways: Sequence[str]) -> _Asked:
    """Send short requests to gateways in turn, from the moment a link is in a state until a second before its end."""
    while not any(link.state is state for link in system.links.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    asked = _Asked(time.monotonic())
    body = plain_bodies(4, 1)[0]
    async with asyncio.TaskGroup() as asking:
        # A request under way when the fault begins may have arrived, and is answered when it is mended.
        for number in range(1, round((span_s - 1.0) / _ASKING_INTERVAL_S)):
            due = asked.began + number * _ASKING_INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            entry = Entry(0, gateways[number % len(gateways)], time.monotonic())
            asked.max_lag_s = max(asked.max_lag_s, entry.sent_at - due)
            asked.answers.append(entry)
            asking.create_task(ask(body, system.port(entry.gateway), API_KEY, entry, 2 * span_s))
    return asked


def _judge_refusals(outcome: Outcome, state: LinkState, asked: _Asked) -> None:
    """Expect a 503 with a time to return: when NATS is suspected, later at once; we may be late to hear of it."""
    verdicts = {(entry.judge(None).value, entry.status) for entry in asked.answers}
    outcome.expect(verdicts == {(Verdict.REFUSED.value, 503)}, f"{state.value}: new requests were {verdicts}")
    suspected_at = asked.began + SUSPECTED_S[state]
    waits_s = [(entry.ended_at or math.inf) - max(entry.sent_at, suspected_at) for entry in asked.answers]
    early_s = [(entry.ended_at or math.inf) - asked.began for entry in asked.answers if entry.sent_at <= suspected_at]
    outcome.figures[f"{state.value}: refusals"] = len(asked.answers)
    outcome.figures[f"{state.value}: asked too late by s"] = round(asked.max_lag_s, 3)
    outcome.figures[f"{state.value}: first refusals after s"] = percentile(early_s, 1.0)
    outcome.figures[f"{state.value}: refusals beyond that p50/p99/max s"] = spread(waits_s)
    allowed_s = REFUSAL_S + asked.max_lag_s
    slow = [wait_s for wait_s in waits_s if wait_s > allowed_s]
    problem = f"{state.value}: {len(slow)} of {len(waits_s)} were not refused {allowed_s:.2f} s after NATS is suspected"
    outcome.expect(not slow, problem)
