"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from ops.chaos.outcome import Outcome
from ops.chaos.scenarios import (
    batch,
    clients,
    fairness,
    gateway_deaths,
    poison,
    resumed_streams,
    server_faults,
    versions,
    worker_deaths,
)

Scenario = Callable[[int | None], Awaitable[Outcome]]

_DISTURBANCES = (
    *worker_deaths.WORKER_DEATHS,
    *server_faults.SERVER_FAULTS,
    *gateway_deaths.GATEWAY_DEATHS,
)
SCENARIOS: dict[str, Scenario] = {disturbance.case: disturbance for disturbance in _DISTURBANCES} | {
    "nats-partition": server_faults.nats_partition,
    "one-way-links": server_faults.one_way_links,
    "clock-jump": server_faults.clock_jump,
    "gateway-sigkill": gateway_deaths.sigkill,
    "resumed-streams": resumed_streams.resumed_streams,
    "resumed-streams-at-once": resumed_streams.resumed_streams_at_once,
    "resumed-streams-earlier": resumed_streams.resumed_streams_earlier,
    "poison": poison.poison,
    "batch-poison": poison.batch_poison,
    "batch-kills": batch.kills,
    "aborts": clients.aborts,
    "never-readers": clients.never_readers,
    "overload-10x": clients.overload,
    "greedy-keys": fairness.greedy_keys,
    "long-prompts": fairness.long_prompts,
    "background": fairness.background,
    **{name: partial(versions.worker_deaths, name) for name in versions.EARLIER_PARTS},
}

# What CI runs, in about three minutes, and with how many requests.
QUICK: dict[str, int | None] = {
    "worker-sigkill": 300,
    "worker-sigstop": 300,
    "worker-sigterm": 200,
    "nats-restart": 200,
    "redis-faults": 200,
    "poison": None,
    "batch-kills": 60,
    "clock-jump": 200,
    "aborts": 1000,
    "greedy-keys": 12,
    "long-prompts": 12,
    "background": 10,
    "earlier-workers": 60,
    "earlier-gateway": 60,
    "mixed-workers": 60,
}

# Of the others, those that take few seconds: CI runs the next one with each commit.
IN_TURN: dict[str, int | None] = {
    "worker-link-faults": 200,
    "never-readers": None,
    "gateway-sigterm": 200,
    "gateway-sigkill-load": 200,
}


def of_ci(turn: int) -> dict[str, int | None]:
    """Return the scenarios of CI with their sizes; `turn` counts the commits."""
    name = list(IN_TURN)[turn % len(IN_TURN)]
    return {**QUICK, name: IN_TURN[name]}
