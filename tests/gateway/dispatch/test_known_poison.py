"""What is remembered of requests that killed workers: the clock is the test's."""

from __future__ import annotations

import msgspec
import pytest

from gateway.dispatch import known_poison
from gateway.dispatch.inflight import Flight, Loss
from gateway.dispatch.known_poison import MAX_VERDICTS, MEMORY_S, KnownPoison
from gateway.errors import ApiError
from gateway.fleet.death import Death
from shared.messages import Request
from shared.sampling import Sampling
from tests.gateway.dispatch_bench import ListSink

REQUEST = Request(id="a", model="m", text="poison", tenant="t", sampling=Sampling(seed=1))


class Remembered:
    def __init__(self) -> None:
        self.now = 100.0
        self.known = KnownPoison(lambda: self.now)

    def convict(self, request: Request = REQUEST) -> Death:
        """Let a flight of this request be found guilty."""
        flight = Flight(request, ListSink(), 1, 0.0)
        death = Death("w", "m", "it is not there any more", self.now, is_blamed=True)
        flight.losses.append(Loss(death, 0, is_solo=True))
        self.known.note(flight)
        return death


@pytest.fixture
def remembered() -> Remembered:
    return Remembered()


@pytest.mark.parametrize(
    "changes", [{"tenant": "u"}, {"text": "food"}, {"model": "n"}, {"sampling": Sampling(seed=1, max_tokens=9)}]
)
def test_another_request_is_not_suspected(remembered: Remembered, changes: dict[str, object]) -> None:
    remembered.convict()
    assert remembered.known.find(msgspec.structs.replace(REQUEST, **changes)) is None


def test_repetition_has_a_death_to_its_account_whatever_its_id_and_seed(remembered: Remembered) -> None:
    death = remembered.convict()
    repetition = msgspec.structs.replace(REQUEST, id="b", sampling=Sampling(seed=2), trace="x", deadline=1.0)
    loss = remembered.known.find(repetition)
    assert loss is not None
    assert loss.death is death


def test_request_that_was_convicted_several_times_is_refused_until_that_is_long_ago(remembered: Remembered) -> None:
    for _ in range(MAX_VERDICTS):
        assert remembered.convict().is_blamed
    with pytest.raises(ApiError, match="10 minutes") as refused:
        remembered.known.find(REQUEST)
    assert (refused.value.status, refused.value.code) == (500, "request_quarantined")
    remembered.now += MEMORY_S + 1
    assert remembered.known.find(REQUEST) is None


def test_death_that_was_none_does_not_count(remembered: Remembered) -> None:
    remembered.convict().is_blamed = False
    assert remembered.known.find(REQUEST) is None


def test_request_that_was_answered_is_forgotten(remembered: Remembered) -> None:
    remembered.convict()
    remembered.known.forget(Flight(REQUEST, ListSink(), 1, 0.0))
    assert remembered.known.find(REQUEST) is None


def test_number_of_remembered_requests_is_bounded(remembered: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_poison, "MAX_REMEMBERED", 2)
    for number in range(3):
        remembered.convict(msgspec.structs.replace(REQUEST, text=str(number)))
    found = [remembered.known.find(msgspec.structs.replace(REQUEST, text=str(number))) for number in range(3)]
    assert [loss is not None for loss in found] == [False, True, True]


def test_answer_to_a_request_that_nobody_knows_changes_nothing(remembered: Remembered) -> None:
    death = remembered.convict()
    remembered.known.forget(Flight(msgspec.structs.replace(REQUEST, text="food"), ListSink(), 1, 0.0))
    loss = remembered.known.find(REQUEST)
    assert loss is not None
    assert loss.death is death
