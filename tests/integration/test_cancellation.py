"""What happens to the work of a client that leaves."""

from __future__ import annotations

import time

from tests.integration.system import System


def _gauge(system: System, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in system.metrics().splitlines() if line.startswith(name))


def test_disconnect_gives_blocks_back_within_250_ms(simulated: System) -> None:
    idle_free = _gauge(simulated, "headrace_fleet_free_blocks")
    stream = simulated.client().completions.create(
        model=simulated.model,
        prompt="x " * 400,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    while _gauge(simulated, "headrace_fleet_free_blocks") == idle_free:
        time.sleep(0.05)
    stream.close()
    time.sleep(0.25 + 0.25)  # the blocks, and the heartbeat that says so
    assert _gauge(simulated, "headrace_fleet_running") == 0
    assert _gauge(simulated, "headrace_fleet_free_blocks") == idle_free
