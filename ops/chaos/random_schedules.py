"""Hypothesis strategies for random schedules of faults, within what the promises cover."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from ops.chaos.fault_proxy import LinkState
from ops.chaos.faults import Drain, Fault, Freeze, Kill, Sever, Squeeze

SPAN_S = 6.0
REVIVAL_S = 3.0
NUM_GATEWAYS = 2
NUM_WORKERS = 3
_WORKERS = [f"worker-{index}" for index in range(NUM_WORKERS)]
_GATEWAYS = [f"gateway-{index}" for index in range(NUM_GATEWAYS)]
_EVERYONE = (*_GATEWAYS, *_WORKERS, "nats", "redis")

_at = st.floats(0.0, SPAN_S).map(lambda value: round(value, 1))
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
        (name, fault.at_s, fault.at_s + fault.for_s + REVIVAL_S) for fault in schedule for name in _touched(fault)
    )
    return all(one[0] != next_[0] or one[2] < next_[1] for one, next_ in itertools.pairwise(spans))


# At most five faults within six seconds, and time to heal after them.
schedules = st.lists(_faults, min_size=1, max_size=5).filter(_is_sound)
