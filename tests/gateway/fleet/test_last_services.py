"""Gateways tell how far tenants were ahead at workers that are silent, so that it survives a worker's death."""

from __future__ import annotations

import msgspec

from gateway.fleet.last_services import MEMORY_S, SILENT_S, LastServices
from shared.services import MAX_TENANTS, Services, TenantService
from tests.gateway.fleet.test_fleet import BEAT


def note(last: LastServices, now: float, worker: str = "w", started: float = 1.0, **ahead: float) -> None:
    services: Services = {"interactive": tuple(TenantService(name, 9.0, tokens) for name, tokens in ahead.items())}
    last.note(msgspec.structs.replace(BEAT, worker=worker, started=started, services=services), now)


def test_what_a_worker_told_last_is_told_once_it_is_silent_and_for_a_while() -> None:
    last = LastServices()
    note(last, 10.0, a=500.0)
    note(last, 10.2, a=400.0, b=0.0)
    assert last.of_silent(10.2 + SILENT_S) == {}
    assert last.of_silent(10.3 + SILENT_S) == {"m": {"interactive": (TenantService("a", 0.0, 400.0),)}}
    # Whoever starts in its place has its name, and nothing to tell yet.
    last.note(msgspec.structs.replace(BEAT, worker="w", started=2.0), 12.0)
    assert "m" in last.of_silent(10.1 + MEMORY_S)
    assert last.of_silent(10.3 + MEMORY_S) == {}


def test_of_several_silent_workers_the_most_counts_and_the_furthest_are_told() -> None:
    last = LastServices()
    note(last, 10.0, "one", a=5.0, **{f"t{number}": 1.0 for number in range(MAX_TENANTS)})
    note(last, 10.0, "two", a=7.0, b=6.0)
    told = last.of_silent(20.0)["m"]["interactive"]
    assert told[:2] == (TenantService("a", 0.0, 7.0), TenantService("b", 0.0, 6.0))
    assert len(told) == MAX_TENANTS
