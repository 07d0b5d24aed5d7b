"""What happens to the work of a client that leaves."""

from __future__ import annotations

from tests.integration.system import System
from tests.waiting import wait_for

# The answer would take 8 s more.
LIMIT_S = 6.0


def test_disconnect_gives_blocks_back_long_before_the_answer_would_end(simulated: System) -> None:
    wait_for(lambda: simulated.gauge("headrace_fleet_running") == 0, LIMIT_S)
    idle_free = simulated.gauge("headrace_fleet_free_blocks")
    stream = simulated.client().completions.create(
        model=simulated.model,
        prompt="x " * 200,
        max_tokens=1600,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_for(lambda: simulated.gauge("headrace_fleet_free_blocks") < idle_free, LIMIT_S)
    stream.close()
    wait_for(lambda: simulated.gauge("headrace_fleet_free_blocks") == idle_free, LIMIT_S)
    assert simulated.gauge("headrace_fleet_running") == 0
