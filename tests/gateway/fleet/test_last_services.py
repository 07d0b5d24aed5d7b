"""Gateways tell how far tenants were ahead at workers that are silent, so that it survives a worker's death."""

from __future__ import annotations

import msgspec

from gateway.fleet.last_services import MAX_BYTES, MEMORY_S, SILENT_S, LastServices
from shared.services import MAX_MODELS, MAX_TENANTS, Services, TenantService
from tests.gateway.fleet.test_fleet import BEAT


def note(last: LastServices, now: float, worker: str = "w", started: float = 1.0, **ahead: float) -> None:
    services: Services = {"interactive": tuple(TenantService(name, 9.0, tokens) for name, tokens in ahead.items())}
    last.note(msgspec.structs.replace(BEAT, worker=worker, started=started, services=services), now)


def test_what_a_worker_told_last_is_told_once_it_is_silent_and_for_a_while() -> None:
    last = LastServices()
    note(last, 10.0, a=500.0)
    note(last, 10.2, a=400.0, b=0.0)
    assert last.of_silent(10.2 + SILENT_S, ["m"], ["m"]) == {}
    told = last.of_silent(10.3 + SILENT_S, ["m"], [])
    assert told == {"m": {"interactive": (TenantService("a", 0.0, 400.0),)}}
    # Whoever starts in its place has its name, and nothing to tell yet.
    last.note(msgspec.structs.replace(BEAT, worker="w", started=2.0), 12.0)
    assert "m" in last.of_silent(10.1 + MEMORY_S, [], [])
    assert last.of_silent(10.3 + MEMORY_S, ["m"], ["m"]) == {}


def test_of_several_silent_workers_the_most_counts_and_the_furthest_are_told() -> None:
    last = LastServices()
    note(last, 10.0, "one", a=5.0, **{f"t{number}": 1.0 for number in range(MAX_TENANTS)})
    note(last, 10.0, "two", a=7.0, b=6.0)
    told = last.of_silent(20.0, [], ["m"])["m"]["interactive"]
    assert told[:2] == (TenantService("a", 0.0, 7.0), TenantService("b", 0.0, 6.0))
    assert len(told) == MAX_TENANTS


def test_made_up_models_are_not_told_while_nobody_asks_for_them() -> None:
    last = LastServices()
    note(last, 10.0, a=5.0)
    assert last.of_silent(12.0, [], []) == {}
    # A request that waited a short while ago is enough, since its model is just what has no worker now.
    assert "m" in last.of_silent(13.0, ["m", "unknown"], [])
    assert "m" in last.of_silent(30.0, [], [])


def test_what_is_told_is_bounded_in_bytes_and_each_model_has_its_share() -> None:
    last = LastServices()
    models = [f"{number:0128}" for number in range(2 * MAX_MODELS)]
    for model in models:
        tenants = tuple(TenantService(f"{number:0128}", 9.0, 100.0 - number) for number in range(MAX_TENANTS))
        beat = msgspec.structs.replace(BEAT, model=model, services={"interactive": tenants, "batch": tenants})
        last.note(beat, 10.0)
    told = last.of_silent(20.0, models[-1:], models)
    assert len(msgspec.msgpack.encode(told)) <= MAX_BYTES
    assert len(told) == MAX_MODELS
    assert next(iter(told)) == models[-1]
    assert all(lane[0].ahead == 100.0 for lanes in told.values() for lane in lanes.values())
