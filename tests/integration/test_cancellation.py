"""What happens to the work of a client that leaves."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.integration.system import System

# The answer would take 8 s more.
LIMIT_S = 6.0


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.02)


def test_disconnect_gives_blocks_back_long_before_the_answer_would_end(simulated: System) -> None:
    _wait_until(lambda: simulated.gauge("headrace_fleet_running") == 0)
    idle_free = simulated.gauge("headrace_fleet_free_blocks")
    stream = simulated.client().completions.create(
        model=simulated.model,
        prompt="x " * 200,
        max_tokens=1600,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    _wait_until(lambda: simulated.gauge("headrace_fleet_free_blocks") < idle_free)
    stream.close()
    _wait_until(lambda: simulated.gauge("headrace_fleet_free_blocks") == idle_free)
    assert simulated.gauge("headrace_fleet_running") == 0
