"""What heartbeats after an absence of NATS say about requests that were not heard of since."""

from __future__ import annotations

import msgspec
import pytest

from gateway.fleet.liveness import FleetLimits, Liveness
from gateway.fleet.resumption import MARGIN_S, NUM_STEPS, Resumption
from tests.gateway.fleet.test_fleet import BEAT

BUSY = msgspec.structs.replace(BEAT, step=100, running=3, waiting=0, waiting_tokens=0)


def _heard(*beats: dict[str, int]) -> Resumption:
    resumption = Resumption()
    for number, changes in enumerate(beats):
        resumption.note_heartbeat(msgspec.structs.replace(BUSY, **changes), float(number))
    return resumption


@pytest.mark.parametrize(
    ("second", "has_stream_news", "has_prompt_news"),
    [
        ({"step": 100 + NUM_STEPS - 1}, False, False),
        ({"step": 100 + NUM_STEPS}, True, True),
        ({"step": 100 + NUM_STEPS, "waiting_tokens": 1}, True, False),
        ({"step": 100 + NUM_STEPS, "waiting": 1}, True, False),
        ({"running": 0}, True, True),
        ({"running": 0, "waiting": 1}, False, False),
    ],
)
def test_steps_tell_of_streams_and_computed_prompts_and_idleness_of_all(
    second: dict[str, int], has_stream_news: bool, has_prompt_news: bool
) -> None:
    resumption = _heard({}, second)
    for now, is_later in ((1.0 + MARGIN_S / 2, False), (1.0 + 2 * MARGIN_S, True)):
        assert resumption.is_complete(now, has_output=True) is (has_stream_news and is_later)
        assert resumption.is_complete(now, has_output=False) is (has_prompt_news and is_later)


def test_one_heartbeat_proves_nothing() -> None:
    resumption = _heard({"running": 0, "step": 1000})
    assert not resumption.is_complete(50.0, has_output=True)
    assert not resumption.is_complete(50.0, has_output=False)


def test_later_heartbeats_do_not_put_the_time_off() -> None:
    resumption = _heard({}, {"step": 200}, {"step": 300})
    assert resumption.is_complete(1.0 + 2 * MARGIN_S, has_output=True)


def test_each_absence_of_nats_begins_anew_and_others_never_resume() -> None:
    liveness = Liveness(FleetLimits())
    liveness.note_heartbeat(BUSY, 1.0)
    liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=200), 1.2)
    assert not liveness.has_resumed(BUSY.worker, 9.0, has_output=True)
    for away_at in (10.0, 20.0):
        liveness.nats_disconnected()
        liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=300), away_at + 1.0)
        assert not liveness.has_resumed(BUSY.worker, away_at + 5.0, has_output=True)
        liveness.note_heartbeat(msgspec.structs.replace(BUSY, step=400), away_at + 1.2)
        assert liveness.has_resumed(BUSY.worker, away_at + 1.4, has_output=True)
    assert not liveness.has_resumed("unknown", 30.0, has_output=True)
