"""Links to NATS that are no use and not cut: too narrow for what is said over them, or passing one way only."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field, replace

from ops.chaos import aftermath, disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import FaultLog, Sever
from ops.chaos.ledger import Entry, Verdict
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome, percentile
from ops.chaos.stream_client import ask
from ops.chaos.system import API_KEY, System, SystemOptions

BYTES_PER_S = 20_000
NARROW_S = 15.0
ONE_WAY_S = 8.0
RECOVERY_S = 1.0
# Two seconds until a link is known to be too narrow, and what it has still to bring of those who were let in.
NARROW_SILENCE_S = 5.0
# After a second of silence NATS is suspected; one that is heard, and does not answer, is after two and a half.
REFUSED_S = {LinkState.HALF_OPEN: 1.2, LinkState.MUTE: 2.7}
_ASKING_INTERVAL_S = 0.2
_OPTIONS = SystemOptions(num_gateways=2, num_workers=2, has_faulty_links=True)
_NARROW = replace(_OPTIONS, link_bytes_per_s=BYTES_PER_S)


async def narrow(num_requests: int | None) -> Outcome:
    """First one of two gateways, then one of two workers, has 20 kB/s to NATS, a fraction of what it wants to say.

    What is late is not lost: said once more, it would only take the place of what is still to come.
    """
    schedule = [
        Sever(1.0, NARROW_S, LinkState.NARROW, "nats", "gateway-0"),
        Sever(5.0 + NARROW_S, NARROW_S, LinkState.NARROW, "nats", "worker-0"),
    ]
    async with System(_NARROW) as system:
        outcome = await disturbance.run_on(
            system,
            Disturbance(
                "narrow-links",
                f"0 failed, p99 <= {NARROW_SILENCE_S:g} s",
                _NARROW,
                mixed_bodies(50),
                lambda n: schedule,
                concurrency=24,
                max_silence_p99_s=NARROW_SILENCE_S,
            ),
        )
        num_lost = system.part("gateway-0").log.count("the connection to NATS is lost")
        outcome.expect(not num_lost, f"the gateway gave up {num_lost} connections over which something came in")
    return outcome


async def one_way(num_requests: int | None) -> Outcome:
    """The link between a gateway and NATS passes one way only, first one, then the other.

    What runs there goes on when it is mended. What is new there is refused, and the other gateway does not notice.
    """
    outcome = Outcome("one-way-links", f"0 failed; refused in {max(REFUSED_S.values())} s; mended + {RECOVERY_S:g} s")
    async with System(_OPTIONS) as system:
        cut_off = Load(system, plain_bodies(300, 6), gateways=("gateway-0",))
        others = Load(system, mixed_bodies(50, 8), gateways=("gateway-1",))
        for load in (cut_off, others):
            await load.learn_references()
        loading = [asyncio.create_task(load.run(1_000_000, 8)) for load in (cut_off, others)]
        log = FaultLog()
        for state in (LinkState.MUTE, LinkState.HALF_OPEN):
            await asyncio.sleep(2.0)
            asking = asyncio.create_task(_ask_new(system, state))
            await log.run(system, [Sever(0.0, ONE_WAY_S, state, "nats", "gateway-0")])
            _judge_new(outcome, state, await asking)
        await asyncio.sleep(2.0)
        for load in (cut_off, others):
            load.stop()
        await asyncio.gather(*loading)
        _judge(outcome, cut_off, others, log.windows)
        await aftermath.check(system, others, outcome)
    return outcome


@dataclass
class _Asked:
    """What was asked anew at the gateway that is cut off: since when, the answers, and how late we were ourselves."""

    began: float
    answers: list[Entry] = field(default_factory=list)
    max_lag_s: float = 0.0


async def _ask_new(system: System, state: LinkState) -> _Asked:
    """Ask short requests of the gateway from the beginning of its trouble nearly to its end."""
    while system.links["gateway-0", "nats"].state is not state:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    asked = _Asked(time.monotonic())
    body = plain_bodies(4, 1)[0]
    async with asyncio.TaskGroup() as asking:
        for number in range(1, round((ONE_WAY_S - 1.0) / _ASKING_INTERVAL_S)):
            due = asked.began + number * _ASKING_INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            entry = Entry(0, "gateway-0", time.monotonic())
            asked.max_lag_s = max(asked.max_lag_s, entry.sent_at - due)
            asked.answers.append(entry)
            asking.create_task(ask(body, system.port("gateway-0"), API_KEY, entry, 2 * ONE_WAY_S))
    return asked


def _judge_new(outcome: Outcome, state: LinkState, asked: _Asked) -> None:
    """All are refused, with a time to return, as soon as the gateway can know that it is cut off."""
    verdicts = {entry.judge(None) for entry in asked.answers}
    outcome.expect(verdicts == {Verdict.REFUSED}, f"{state.value}: new requests were {verdicts}")
    limit_s = REFUSED_S[state] + asked.max_lag_s
    waits_s = [
        (entry.ended_at or math.inf) - max(entry.sent_at, asked.began + REFUSED_S[state]) for entry in asked.answers
    ]
    ended_s = [(entry.ended_at or math.inf) - asked.began for entry in asked.answers if entry.sent_at < asked.began + 1]
    outcome.figures[f"{state.value}: first refusals after s"] = percentile(ended_s, 1.0)
    outcome.figures[f"{state.value}: refusals beyond that p50/max s"] = [percentile(waits_s, at) for at in (0.5, 1.0)]
    slow = [wait_s for wait_s in waits_s if wait_s > 0.1 + asked.max_lag_s]
    outcome.expect(not slow, f"{state.value}: {len(slow)} of {len(waits_s)} were not refused within {limit_s:.1f} s")


def _judge(outcome: Outcome, cut_off: Load, others: Load, windows: list[tuple[float, float]]) -> None:
    outcome.count(cut_off.ledger, windows)
    recovery_s = percentile(outcome.recoveries_s, 0.99) or 0.0
    outcome.figures["silent after it was mended p99 s"] = recovery_s
    outcome.expect(recovery_s <= RECOVERY_S, f"streams were silent for {recovery_s:.2f} s after it was mended")
    beside = Outcome("", "")
    beside.count(others.ledger, windows)
    outcome.problems += [f"at the other gateway: {problem}" for problem in beside.problems]
    outcome.num_requests += beside.num_requests
    outcome.num_failed += beside.num_failed
    outcome.num_wrong += beside.num_wrong
    silence_s = percentile(beside.silences_s, 0.99) or 0.0
    outcome.figures["silence at the other gateway p99 s"] = silence_s
    outcome.expect(silence_s <= 1.5, f"the other gateway's streams were silent for {silence_s:.2f} s")
