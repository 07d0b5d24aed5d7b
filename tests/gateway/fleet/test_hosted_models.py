"""What gateways make of models that hosts load on demand."""

from __future__ import annotations

import msgspec

from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.hosted_models import HOST_SILENCE_S, MAX_MODELS
from gateway.fleet.liveness import FleetLimits
from gateway.fleet.readiness import readiness
from shared.hosted_models import HostBeat, HostedModel, HostedState
from tests.gateway.fleet.test_fleet import BEAT


def new_fleet() -> Fleet:
    return Fleet("gw", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))


def coming(fleet: Fleet) -> HostedModel | None:
    load = fleet.load("m")
    assert load is not None
    return load.coming


def beat(state: HostedState, host: str = "h", **fields: object) -> HostBeat:
    values = {"path": "/m", "on_demand": True, "ready_in_s": 3.0, **fields}
    return HostBeat(host=host, models=(HostedModel(name="m", state=state, **values),))  # type: ignore[arg-type]


def test_sleeping_model_is_served_and_read_as_its_last_worker_read_it() -> None:
    fleet = new_fleet()
    fleet.note_host_beat(
        beat("asleep", last=msgspec.structs.replace(BEAT, model="m", chat_format="qwen", max_model_len=77)), 1.0
    )
    load = fleet.load("m")
    assert load is not None
    assert (load.num_workers, load.chat_format, load.max_model_len) == (0, "qwen", 77)
    assert load.coming is not None
    assert fleet.served_models() == ["m"]
    assert readiness(fleet, is_connected=True).models == ("m",)


def test_load_that_was_asked_for_follows_what_the_host_tells() -> None:
    fleet = new_fleet()
    told: list[tuple[HostedState, float]] = [("asleep", 9.0), ("loading", 4.0), ("loading", 1.0), ("failed", 0.0)]
    shown = []
    for state, ready_in_s in told:
        fleet.note_host_beat(beat(state, ready_in_s=ready_in_s), 1.0)
        model = coming(fleet)
        assert model is not None
        shown.append((model.state, model.ready_in_s))
    assert shown == told
    # The model is known while workers of others are there, and no model that no host has.
    fleet.note_heartbeat(msgspec.structs.replace(BEAT, model="other"), 1.0)
    assert [fleet.knows(name) for name in ("m", "none")] == [True, False]
    assert fleet.load("none") is None


def test_model_with_workers_does_not_wait_for_its_host() -> None:
    fleet = new_fleet()
    fleet.note_host_beat(beat("failed"), 1.0)
    assert fleet.has_failed("m")
    fleet.note_heartbeat(msgspec.structs.replace(BEAT, model="m"), 1.0)
    assert coming(fleet) is None
    assert not fleet.has_failed("m")


def test_host_that_will_serve_first_counts() -> None:
    fleet = new_fleet()
    for host, state, ready_in_s in (("a", "failed", 0.0), ("b", "asleep", 9.0), ("c", "asleep", 2.0)):
        fleet.note_host_beat(beat(state, host, ready_in_s=ready_in_s), 1.0)  # type: ignore[arg-type]
    found = fleet.hosted.find("m")
    assert found is not None
    assert (found.state, found.ready_in_s) == ("asleep", 2.0)
    assert not fleet.has_failed("m")


def test_worker_that_is_withheld_is_not_waited_for_but_one_that_its_host_starts_is() -> None:
    fleet = new_fleet()
    fleet.note_host_beat(beat("awake", num_ready=1), 1.0)
    assert fleet.coming("m") is not None  # Ready, and not heard here yet.
    cordoned = msgspec.structs.replace(BEAT, model="m", draining=True)
    fleet.note_heartbeat(cordoned, 1.0)
    assert fleet.coming("m") is coming(fleet) is None
    assert readiness(fleet, is_connected=True).status == "no_worker"
    fleet.note_host_beat(beat("asleep", "b"), 1.0)
    assert readiness(fleet, is_connected=True).models == ("m",)
    found = fleet.coming("m")
    assert found is not None
    assert found.state == "asleep"
    fleet.note_host_beat(beat("awake", num_ready=2), 1.0)
    found = fleet.coming("m")
    assert found is not None
    assert found.state == "awake"


def test_nothing_is_waited_for_that_a_silent_host_could_load() -> None:
    fleet = new_fleet()
    fleet.note_host_beat(beat("asleep"), 1.0)
    fleet.sweep(1.0 + HOST_SILENCE_S)
    assert fleet.served_models() == ["m"]
    fleet.discount_pause(2.0, 6.0)
    fleet.sweep(7.9)
    assert fleet.served_models() == ["m"]
    fleet.sweep(8.1)
    assert coming(fleet) is None
    assert fleet.served_models() == []


def test_models_that_are_made_up_are_bounded_and_push_out_none_that_is_known() -> None:
    fleet = new_fleet()
    fleet.note_host_beat(beat("asleep", "real"), 1.0)
    for number in range(40):
        models = tuple(
            HostedModel(name=f"{number}-{index}", path="/m", state="asleep", on_demand=True) for index in range(100)
        )
        fleet.note_host_beat(HostBeat(host=f"made-up-{number}", models=models), 1.0)
    names = fleet.served_models()
    assert len(names) <= MAX_MODELS
    assert "m" in names
    fleet.note_host_beat(beat("awake", "real"), 1.0 + HOST_SILENCE_S)
    found = fleet.hosted.find("m")
    assert found is not None
    assert found.state == "awake"
    # They are forgotten with their hosts, and leave their room.
    fleet.sweep(1.1 + HOST_SILENCE_S)
    assert fleet.served_models() == ["m"]
    fleet.note_host_beat(HostBeat(host="late", models=models), 2.0 + HOST_SILENCE_S)
    assert len(fleet.served_models()) == 101
