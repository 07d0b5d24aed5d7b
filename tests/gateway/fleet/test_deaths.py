"""How long a death is remembered, whatever comes between."""

from __future__ import annotations

from gateway.fleet.deaths import Death, RememberedDeaths


def die(deaths: RememberedDeaths, worker: str, at: float) -> None:
    deaths.add(Death(worker, "m", "it is not there any more", at, True), 1.0, at - 1)


def remembered(deaths: RememberedDeaths) -> list[str]:
    return [death.worker for death in deaths.since("m", 0.0)]


def test_deaths_of_ten_minutes_are_remembered() -> None:
    deaths = RememberedDeaths()
    for at, worker in enumerate("abc"):
        die(deaths, worker, at * 300.0)
    assert remembered(deaths) == ["a", "b", "c"]
    die(deaths, "d", 601.0)
    assert remembered(deaths) == ["b", "c", "d"]


def test_worker_that_dies_again_keeps_no_older_death_in_memory() -> None:
    deaths = RememberedDeaths()
    die(deaths, "a", 0.0)
    die(deaths, "b", 1.0)
    die(deaths, "a", 590.0)
    die(deaths, "c", 602.0)
    assert remembered(deaths) == ["a", "c"]
