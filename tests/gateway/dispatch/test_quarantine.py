"""What is written down of a request that is taken out of service."""

from __future__ import annotations

import pytest

from gateway.dispatch.inflight import Flight, Loss
from gateway.dispatch.quarantine import Quarantine
from gateway.fleet.death import Death
from shared.dead_letters import DeadAttempt, DeadLetter, DeadReason
from shared.messages import Request
from tests.gateway.dispatch_bench import ListSink


async def test_dead_letter_says_what_became_of_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    letters: list[DeadLetter] = []

    async def publish(nats: object, letter: DeadLetter) -> None:
        letters.append(letter)

    monkeypatch.setattr("gateway.dispatch.quarantine.publish_dead_letter", publish)
    reasons: list[DeadReason] = []
    quarantine = Quarantine(None, "g", reasons.append)  # type: ignore[arg-type]
    flight = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, 0.0, epoch=2, emitted=[7])
    flight.losses.append(Loss(Death("w", "m", "its heartbeats stopped", 5.0, is_blamed=True), 1, is_solo=True))
    error = quarantine.take(flight, "worker_lost", "It kills.")
    await quarantine.close()
    [letter] = letters
    death = flight.losses[0].death
    assert letter.attempts == (DeadAttempt("w", 1, death.time, "its heartbeats stopped"),)
    assert (letter.request.epoch, letter.request.emitted, letter.quarantined_by) == (2, (7,), "g")
    assert letter.reason == "worker_lost"
    assert reasons == ["worker_lost"]
    assert letter.error == error.message == "It kills. The request is in quarantine under the id a."
    assert error.headers["x-should-retry"] == "false"
