"""Random schedules of faults: whatever dies when, every request ends once and with the right text."""

from __future__ import annotations

import itertools

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ops.chaos.aftermath import DEAD_GATEWAY_TIMEOUT_S
from ops.chaos.disturbance import Disturbance
from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import Drain, Fault, Freeze, Kill, Sever, Squeeze
from ops.chaos.mix import mixed_bodies
from ops.chaos.system import SystemOptions

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

_SPAN_S = 6.0
_REVIVAL_S = 3.0
_NUM_GATEWAYS = 2
_NUM_WORKERS = 3
_WORKERS = [f"worker-{index}" for index in range(_NUM_WORKERS)]
_GATEWAYS = [f"gateway-{index}" for index in range(_NUM_GATEWAYS)]
_EVERYONE = (*_GATEWAYS, *_WORKERS, "nats", "redis")

_at = st.floats(0.0, _SPAN_S).map(lambda value: round(value, 1))
_short = st.floats(0.1, 2.5).map(lambda value: round(value, 1))
_workers = st.sampled_from(_WORKERS)
_servers = st.sampled_from(["nats", "redis"])
_states = st.sampled_from([LinkState.PARTITIONED, LinkState.HALF_OPEN, LinkState.CUT, LinkState.SLOW])

_faults: st.SearchStrategy[Fault] = st.one_of(
    st.builds(Kill, _at, _short, _workers),
    st.builds(Kill, _at, _short, _servers),
    st.builds(Kill, _at, _short, st.sampled_from(_GATEWAYS)),
    st.builds(Drain, _at, _short, _workers),
    st.builds(Freeze, _at, _short, st.tuples(_workers)),
    st.builds(Freeze, _at, _short, st.tuples(_servers)),
    st.builds(Freeze, _at, _short, st.just(_EVERYONE)),
    st.builds(Squeeze, _at, _short, _workers),
    st.builds(Sever, _at, _short, _states, _servers, st.sampled_from(_GATEWAYS)),
    st.builds(Sever, _at, _short, _states, st.just("nats"), _workers),
)


def _touched(fault: Fault) -> set[str]:
    match fault:
        case Freeze():
            return set(fault.parts)
        case Kill() | Drain() | Squeeze():
            return {fault.part}
    return set()


def _is_sound(schedule: list[Fault]) -> bool:
    """Whether each fault finds the process it is about whole: no two faults touch the same one at a time."""
    spans = sorted(
        (name, fault.at_s, fault.at_s + fault.for_s + _REVIVAL_S) for fault in schedule for name in _touched(fault)
    )
    return all(one[0] != next_[0] or one[2] < next_[1] for one, next_ in itertools.pairwise(spans))


# At most five faults within six seconds, and time to heal after them.
_schedules = st.lists(_faults, min_size=1, max_size=5).filter(_is_sound)
_OPTIONS = SystemOptions(num_gateways=_NUM_GATEWAYS, num_workers=_NUM_WORKERS, has_faulty_links=True)


# A failing schedule is not shrunk: each try takes half a minute. Hypothesis prints it, and it can be cut by hand.
@settings(
    max_examples=8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(schedule=_schedules)
def test_random_faults_lose_no_request_and_change_no_text(schedule: list[Fault]) -> None:
    outcome = uvloop.run(
        Disturbance(
            "random",
            lambda n: schedule,
            options=_OPTIONS,
            bodies=mixed_bodies(80),
            concurrency=16,
            tail_s=3.0,
            queue_timeout_s=DEAD_GATEWAY_TIMEOUT_S,
        )()
    )
    assert outcome.problems == []
