"""Promises under overload, measured around the real shedder with a fake clock: who returns when told is admitted."""

from __future__ import annotations

import pytest

from tests.gateway.overload_simulation import CAPACITY, SLO_S, Simulation

BINS = ("<20", "20-40", ">40")


@pytest.mark.parametrize("return_share", [1.0, 0.5])
@pytest.mark.parametrize(("overload", "duration_s"), [(2, 60), (5, 20), (10, 10)])
def test_nine_in_ten_who_return_when_told_are_admitted_at_every_told_time(
    overload: int, duration_s: float, return_share: float
) -> None:
    simulation = Simulation(3, lambda now: {"a": overload * CAPACITY}, return_share)
    report = simulation.run(duration_s)
    for told in BINS:
        admitted, returned = report.returns[("booked", told)]
        assert returned == 0 or admitted / returned >= 0.9, (told, report.returns)
    assert sum(report.returns[("booked", told)][1] for told in BINS) > 100
    assert report.utilization >= 0.95
    assert max(report.first_tokens_s) <= 2 * SLO_S


def test_nobody_returning_leaves_no_slot_idle() -> None:
    report = Simulation(3, lambda now: {"a": 10 * CAPACITY}, return_share=0.0).run(60)
    assert report.utilization >= 0.95


@pytest.mark.parametrize("decode_error", [0.8, 1.1])
def test_promises_hold_although_the_rate_is_measured_wrongly(decode_error: float) -> None:
    report = Simulation(3, lambda now: {"a": 5 * CAPACITY}, decode_error=decode_error).run(20)
    for told in BINS:
        assert report.share("booked", told) >= 0.9, report.returns


def test_tenant_who_asks_a_hundred_times_as_much_does_not_push_another_out() -> None:
    def arrivals(now: float) -> dict[str, float]:
        return {"hog": 10 * CAPACITY, "small": 0.1 * CAPACITY if now > 20 else 0.0}

    report = Simulation(3, arrivals).run(40)
    waits = {tenant: sum(waits) / len(waits) for tenant, waits in report.refused_of_tenant.items() if waits}
    assert waits["hog"] > 30
    assert waits.get("small", 0.0) < 20


def test_simulation_without_reservations_keeps_few_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this measures: with clients that are not recognised, most of those who return are refused again."""
    monkeypatch.setattr("gateway.admission.reservations.ReservationBook.find", lambda *_: None)
    report = Simulation(3, lambda now: {"a": 10 * CAPACITY}).run(10)
    assert min(report.share("booked", told) for told in BINS) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("overload", "duration_s"), [(2, 300), (5, 120), (10, 60)])
def test_promises_hold_when_the_line_is_many_times_longer_than_the_horizon(
    overload: int, duration_s: float, seed: int
) -> None:
    report = Simulation(seed, lambda now: {"a": overload * CAPACITY}).run(duration_s)
    for told in BINS:
        assert report.share("booked", told) >= 0.9, report.returns
    assert report.utilization >= 0.95
