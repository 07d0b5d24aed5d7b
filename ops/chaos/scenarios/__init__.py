"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ops.chaos.disturbance import Disturbance
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios import clients, deaths, fairness, poison, resumed_streams, server_faults
from ops.chaos.scenarios.resumed_streams import ResumedStreams

Scenario = Callable[[int | None], Coroutine[Any, Any, Outcome]]

_TABLE: tuple[Disturbance | ResumedStreams, ...] = (
    *deaths.DEATHS,
    *server_faults.SERVER_FAULTS,
    *resumed_streams.RESUMED_STREAMS,
)
SCENARIOS: dict[str, Scenario] = {scenario.case: scenario for scenario in _TABLE} | {
    "nats-partition": server_faults.nats_partition,
    "one-way-links": server_faults.one_way_links,
    "gateway-sigkill": deaths.sigkill,
    "poison": poison.poison,
    "batch-poison": poison.batch_poison,
    "batch-kills": poison.kills,
    "aborts": clients.aborts,
    "never-readers": clients.never_readers,
    "overload-10x": clients.overload,
    "greedy-keys": fairness.greedy_keys,
    "long-prompts": fairness.long_prompts,
    "background": fairness.background,
}

# What CI runs with each commit, and with how many requests; with those whose turn it is, in about three minutes.
QUICK: dict[str, int | None] = {
    "worker-sigkill": 300,
    "worker-sigstop": 300,
    "nats-restart": 200,
    "redis-faults": 200,
    "batch-kills": 60,
}

# The others that take less than a minute: CI runs the next ones with each commit.
IN_TURN: dict[str, int | None] = {
    "poison": None,
    "clock-jump": 200,
    "aborts": 1000,
    "greedy-keys": 12,
    "earlier-workers": 60,
    "worker-link-faults": 200,
    "long-prompts": 12,
    "earlier-gateway": 60,
    "gateway-sigkill-load": 200,
    "background": 10,
    "mixed-workers": 60,
    "worker-sigterm": 200,
    "never-readers": None,
    "gateway-sigterm": 200,
}
NUM_IN_TURN = 3


def of_ci(turn: int) -> dict[str, int | None]:
    """Return the scenarios of CI with their sizes; `turn` counts the commits."""
    names = list(IN_TURN)
    numbers = range(turn * NUM_IN_TURN, (turn + 1) * NUM_IN_TURN)
    return QUICK | {name: IN_TURN[name] for name in (names[number % len(names)] for number in numbers)}
