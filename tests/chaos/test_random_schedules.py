"""Random schedules of faults: whatever dies when, every request ends once and with the right text."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ops.chaos import disturbance
from ops.chaos.aftermath import DEAD_GATEWAY_TIMEOUT_S
from ops.chaos.disturbance import Disturbance
from ops.chaos.faults import Fault
from ops.chaos.mix import mixed_bodies
from ops.chaos.random_schedules import NUM_GATEWAYS, NUM_WORKERS, schedules
from ops.chaos.system import SystemOptions

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

_OPTIONS = SystemOptions(num_gateways=NUM_GATEWAYS, num_workers=NUM_WORKERS, has_faulty_links=True)


# A failing schedule is not shrunk: each try takes half a minute. Hypothesis prints it, and it can be cut by hand.
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(schedule=schedules)
def test_random_faults_lose_no_request_and_change_no_text(schedule: list[Fault]) -> None:
    outcome = disturbance.run_alone(
        Disturbance(
            "random",
            "0 failed",
            _OPTIONS,
            mixed_bodies(80),
            lambda n: schedule,
            concurrency=16,
            tail_s=3.0,
            queue_timeout_s=DEAD_GATEWAY_TIMEOUT_S,
        )
    )
    assert outcome.problems == []
