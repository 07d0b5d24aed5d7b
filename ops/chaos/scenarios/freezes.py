"""NATS that stands still again and again for a moment, alone and with a gateway; nobody is dead, nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ops.chaos import disturbance
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Fault, Freeze
from ops.chaos.mix import mixed_bodies, plain_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import System, SystemOptions

_OPTIONS = SystemOptions(num_gateways=2, num_workers=2)
_BODIES = (*plain_bodies(700, 6), *mixed_bodies(60, 8))
NUM_FREEZES = 12
SHORTEST_S, LONGEST_S = 0.3, 2.0
# Between two freezes: less than it takes to notice anything, and time for a few steps.
_PAUSES_S = (0.1, 0.3, 0.7)
RECOVERY_S = 1.0
# Of NATS and gateway-0: when each stands still, in seconds after the beginning of a round, and for how long.
_ROUNDS = {
    "before": ((0.6, 1.2), (0.0, 0.5)),
    "into": ((0.4, 1.2), (0.0, 0.9)),
    "within": ((0.0, 2.0), (0.6, 0.8)),
    "around": ((0.4, 0.8), (0.0, 1.8)),
    "out of": ((0.0, 1.2), (0.8, 1.0)),
    "after": ((0.0, 1.2), (1.3, 0.6)),
}
_ROUND_S = 2.6


async def nats_burst(num_requests: int | None) -> Outcome:
    """NATS stands still again and again, for 0.3 to 2 s, with hardly any time between."""
    schedule = _burst(random.Random(11))
    return await _judged("nats-freeze-burst", f"0 failed, p99 <= {LONGEST_S + RECOVERY_S:g} s", schedule, LONGEST_S)


async def nats_and_gateway(num_requests: int | None) -> Outcome:
    """NATS stands still, and a gateway does before, around, within and after that: two rounds of each."""
    schedule: list[Fault] = []
    for number, (of_nats, of_gateway) in enumerate([*_ROUNDS.values()] * 2):
        began_s = number * _ROUND_S
        schedule.append(Freeze(began_s + of_nats[0], of_nats[1], ("nats",)))
        schedule.append(Freeze(began_s + of_gateway[0], of_gateway[1], ("gateway-0",)))
    longest_s = max(max(start + span for start, span in round_) for round_ in _ROUNDS.values())
    return await _judged(
        "nats-and-gateway-freezes", f"0 failed, p99 <= {longest_s + RECOVERY_S:g} s", schedule, longest_s
    )


def _burst(chance: random.Random) -> Sequence[Fault]:
    schedule, at_s = [], 0.0
    for _ in range(NUM_FREEZES):
        for_s = round(chance.uniform(SHORTEST_S, LONGEST_S), 2)
        schedule.append(Freeze(at_s, for_s, ("nats",)))
        at_s += for_s + chance.choice(_PAUSES_S)
    return schedule


async def _judged(case: str, promise: str, schedule: Sequence[Fault], longest_s: float) -> Outcome:
    """Run a schedule in which nobody dies; a worker that is taken for dead all the same is a false alarm."""
    async with System(_OPTIONS) as system:
        outcome = await disturbance.run_on(
            system,
            Disturbance(
                case,
                promise,
                _OPTIONS,
                _BODIES,
                lambda n: schedule,
                concurrency=14,
                max_silence_p99_s=longest_s + RECOVERY_S,
                max_recovery_p99_s=RECOVERY_S,
            ),
        )
        num_alarms = sum(gateway.log.count(" is dead: ") for gateway in system.gateways)
        outcome.figures["workers taken for dead"] = num_alarms
        outcome.expect(not num_alarms, f"a worker was taken for dead {num_alarms} times, and none was")
    return outcome
