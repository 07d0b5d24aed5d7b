"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ops.chaos.outcome import Outcome
from ops.chaos.scenarios import (
    background,
    batch,
    batch_choices,
    batch_poison,
    clients,
    clock,
    disk,
    freezes,
    gateway_deaths,
    greedy_keys,
    hostile,
    links,
    moments,
    pairs,
    poison,
    server_faults,
    shared_port,
    versions,
    worker_deaths,
)

Scenario = Callable[[int | None], Awaitable[Outcome]]

SCENARIOS: dict[str, Scenario] = {
    "worker-sigkill": worker_deaths.sigkill,
    "worker-sigkill-queue": worker_deaths.sigkill_behind_a_queue,
    "worker-sigstop": worker_deaths.sigstop,
    "worker-sigterm": worker_deaths.sigterm,
    "worker-oom": worker_deaths.out_of_memory,
    "worker-sigkill-real": worker_deaths.sigkill_real,
    "three-deaths": worker_deaths.three_deaths,
    "nats-restart": server_faults.nats_restart,
    "nats-freezes": server_faults.nats_freezes,
    "nats-freeze-burst": freezes.nats_burst,
    "nats-and-gateway-freezes": freezes.nats_and_gateway,
    "nats-partition": server_faults.nats_partition,
    "redis-faults": server_faults.redis_faults,
    "worker-link-faults": server_faults.worker_link_faults,
    "narrow-links": links.narrow,
    "one-way-links": links.one_way,
    "pause-of-everything": server_faults.pause_of_everything,
    "pause-of-workers": server_faults.pause_of_workers,
    "pause-of-gateways": server_faults.pause_of_gateways,
    "gateway-frozen": server_faults.gateway_frozen,
    "shared-port": shared_port.process_frozen,
    "poison": poison.poison,
    "gateway-sigkill": gateway_deaths.sigkill,
    "gateway-sigkill-load": gateway_deaths.sigkill_under_load,
    "gateway-sigterm": gateway_deaths.sigterm,
    "batch-kills": batch.kills,
    "batch-choices": batch_choices.kills,
    "batch-poison": batch_poison.poison,
    "full-disk": disk.full,
    "clock-jump": clock.jumps,
    "moments": moments.all_moments,
    "two-faults": pairs.pairs,
    "malformed": hostile.malformed,
    "aborts": clients.aborts,
    "never-readers": clients.never_readers,
    "overload-10x": clients.overload,
    "idle-streams": clients.idle_streams,
    "greedy-keys": greedy_keys.greedy_keys,
    "background": background.first_texts,
    "earlier-workers": versions.earlier_workers,
    "earlier-gateway": versions.earlier_gateway,
    "mixed-workers": versions.mixed_workers,
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
    "malformed": 8000,
    "greedy-keys": 12,
    "background": 10,
    "earlier-workers": 60,
    "earlier-gateway": 60,
    "mixed-workers": 60,
}
