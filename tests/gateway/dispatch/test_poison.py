"""Who is suspected, who is to blame: deaths and flights are in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from gateway.dispatch import poison
from gateway.dispatch.flight_log import Loss
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.poison import (
    HARMLESS_TOKENS,
    MAX_SOLO_LOSSES,
    MAX_VERDICTS,
    MEMORY_S,
    KnownPoison,
    ProbationQueue,
    Quarantine,
)
from gateway.errors import ApiError
from gateway.fleet.deaths import Death
from shared.dead_letters import DeadAttempt, DeadLetter
from shared.kv_budget import KvBudget
from shared.media import MediaRef
from shared.messages import Request
from shared.pooling import Pooling
from shared.sampling import Sampling
from tests.gateway.dispatch_bench import ListSink


def flight(num_produced: int = 0, probation: int = 0) -> Flight:
    """Return a flight that had three tokens when its attempt began and has produced this many more."""
    result = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, 0.0)
    result.start, result.emitted, result.probation = 3, [1] * (3 + num_produced), probation
    return result


def death(found_at: float = 0.0, *, model: str = "m", is_blamed: bool = True) -> Death:
    return Death("w", model, "it is not there any more", found_at, is_blamed)


@pytest.mark.parametrize(
    ("num_produced", "num_deaths", "probation"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 1),
        (1, 1, 0),
        (1, 2, HARMLESS_TOKENS),
        (HARMLESS_TOKENS - 1, 2, HARMLESS_TOKENS),
        (HARMLESS_TOKENS, 2, 0),
    ],
)
def test_probation_follows_what_was_produced_before_deaths(num_produced: int, num_deaths: int, probation: int) -> None:
    one = flight(num_produced)
    for _ in range(num_deaths):
        poison.note_death([one], death())
    assert poison.probation(one) == probation


def test_only_suspect_is_to_blame_and_its_neighbours_are_not() -> None:
    suspect, neighbour = flight(probation=1), flight(num_produced=1)
    for _ in range(MAX_SOLO_LOSSES):
        assert not poison.is_to_blame(suspect)
        poison.note_death([suspect, neighbour], death())
    assert poison.is_to_blame(suspect)
    assert not poison.is_to_blame(neighbour)


def test_suspect_that_explains_no_more_deaths_than_happen_without_it_is_not_to_blame() -> None:
    suspect, passed, begun, copy = flight(probation=1), flight(num_produced=1), flight(), flight()
    for other in (passed, begun):
        other.request = msgspec.structs.replace(other.request, text="another")
    deaths = poison.UnexplainedDeaths()

    def die(found_at: float, *held: Flight, **options: Any) -> None:
        one = death(found_at, **options)
        deaths.note(one, poison.note_death(list(held), one))

    die(1.0, passed)
    for found_at in (2.0, 3.0):
        die(found_at, suspect)
    die(2.5, copy)
    die(2.5, passed, model="another")
    die(2.5, passed, is_blamed=False)
    assert deaths.num_without(suspect) == 0
    die(4.0, passed)
    assert poison.is_to_blame(suspect, deaths)
    die(5.0, begun, passed)
    assert not poison.is_to_blame(suspect, deaths)
    die(6.0, suspect)
    assert poison.is_to_blame(suspect, deaths)
    die(7.0, passed)
    assert not poison.is_to_blame(suspect, deaths)
    # What had begun at the fifth death turns out to explain it.
    begun.probation = 1
    die(8.0, begun)
    assert poison.is_to_blame(suspect, deaths)


def test_suspect_is_to_blame_for_five_deaths_whatever_else_happens() -> None:
    suspect, deaths = flight(probation=1), poison.UnexplainedDeaths()
    for number in range(MAX_SOLO_LOSSES + poison.MAX_MORE_LOSSES):
        assert not poison.is_to_blame(suspect, deaths)
        own, other = death(number), death(number + 0.5)
        for held, one in (([suspect], own), ([], other), ([], other)):
            deaths.note(one, poison.note_death(held, one))
    assert poison.is_to_blame(suspect, deaths)


def test_deaths_of_long_ago_do_not_count_for_a_suspect() -> None:
    suspect, deaths = flight(probation=1), poison.UnexplainedDeaths()
    for held, found_at in (([suspect], 0.0), ([], 1.0), ([], 2.0), ([suspect], 100.0)):
        one = death(found_at)
        deaths.note(one, poison.note_death(held, one))
    assert poison.is_to_blame(suspect, deaths)


def test_suspect_beside_a_request_that_had_just_begun_is_not_to_blame() -> None:
    suspect = flight(probation=1)
    for _ in range(MAX_SOLO_LOSSES + 1):
        fresh = flight()
        poison.note_death([suspect, fresh], death())
        assert not poison.is_to_blame(fresh)
        assert poison.probation(fresh) == 1
    assert not poison.is_to_blame(suspect)


def test_two_suspects_on_one_worker_leave_it_open_who_is_to_blame() -> None:
    suspects = [flight(probation=1), flight(probation=1)]
    for _ in range(MAX_SOLO_LOSSES + 1):
        poison.note_death(suspects, death())
    assert not any(map(poison.is_to_blame, suspects))


def test_suspect_that_has_passed_its_probation_is_not_to_blame() -> None:
    passed = flight(num_produced=1, probation=1)
    for _ in range(MAX_SOLO_LOSSES + 1):
        poison.note_death([passed], death())
    assert not poison.is_to_blame(passed)


def test_deaths_that_were_taken_back_count_for_nothing() -> None:
    suspect, found = flight(probation=1), [death() for _ in range(MAX_SOLO_LOSSES)]
    for one in found:
        poison.note_death([suspect], one)
    assert poison.is_to_blame(suspect)
    found[0].is_blamed = False
    assert not poison.is_to_blame(suspect)
    found[1].is_blamed = False
    assert poison.probation(suspect) == 0


def test_death_after_which_an_unclaimed_request_was_gone_counts_once() -> None:
    one, known = flight(), death()
    for _ in range(3):
        poison.note_swallowed(one, [known])
    assert len(one.losses) == 1
    assert poison.probation(one) == 1
    assert not poison.is_to_blame(one)


def test_attempt_that_lives_long_enough_clears_what_was_before() -> None:
    one = flight(num_produced=1)
    poison.note_death([one], death())
    one.emitted += [1] * HARMLESS_TOKENS
    poison.note_death([one], death())
    one.start = len(one.emitted) - 1
    poison.note_death([one], death())
    assert poison.probation(one) == 0


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
    "changes",
    [
        {"tenant": "u"},
        {"text": "food"},
        {"model": "n"},
        {"sampling": Sampling(seed=1, max_tokens=9)},
        {"suffix": "food"},
        {"adapter": "a" * 64},
        {"media": (MediaRef(digest="a" * 64, num_bytes=9, mime="image/png", width=1, height=1),)},
        {"pooling": Pooling(task="score", query="food")},
        {"kv_budget": KvBudget(64)},
        {"prediction": "food"},
        {"truncate_prompt_tokens": 4},
        {"add_special_tokens": False},
    ],
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


def test_request_that_was_answered_is_forgotten_and_no_other(remembered: Remembered) -> None:
    death = remembered.convict()
    remembered.known.forget(Flight(msgspec.structs.replace(REQUEST, text="food"), ListSink(), 1, 0.0))
    assert (loss := remembered.known.find(REQUEST)) is not None
    assert loss.death is death
    remembered.known.forget(Flight(REQUEST, ListSink(), 1, 0.0))
    assert remembered.known.find(REQUEST) is None


def test_number_of_remembered_requests_is_bounded(remembered: Remembered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MAX_REMEMBERED", 2)
    for number in range(3):
        remembered.convict(msgspec.structs.replace(REQUEST, text=str(number)))
    found = [remembered.known.find(msgspec.structs.replace(REQUEST, text=str(number))) for number in range(3)]
    assert [loss is not None for loss in found] == [False, True, True]


def suspect(table: FlightTable, request_id: str, tenant: str = "t", model: str = "m") -> Flight:
    request = Request(id=request_id, model=model, text=f"prompt {request_id}", tenant=tenant)
    flight = Flight(request, ListSink(), 1, 0.0, probation=1, losses=[Loss(death(model=model), 0, is_solo=False)])
    table.add(flight)
    return flight


def test_suspects_whose_worker_is_heard_again_do_not_wait_for_their_turn() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    suspects = [suspect(table, name) for name in "abc"]
    for each in suspects:
        queue.add(each)
    assert queue.take_ready() == suspects[:1]
    assert queue.take_ready() == []
    for each in suspects[1:]:
        each.losses[0].death.is_blamed = False
    assert queue.take_ready() == suspects[1:]
    assert [(each.is_parked, each.probation) for each in suspects] == [(False, 1), (False, 0), (False, 0)]


def test_next_suspect_begins_once_the_running_one_has_passed_its_probation() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    suspects = [suspect(table, name) for name in "ab"]
    for each in suspects:
        queue.add(each)
    assert queue.take_ready() == suspects[:1]
    assert queue.take_ready() == []
    suspects[0].emitted.append(7)
    assert queue.take_ready() == suspects[1:]


def test_tenants_take_turns_with_their_suspects() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    # One tenant's many suspects were there before the other's only one.
    for number, tenant in enumerate(["many", "many", "many", "one"]):
        queue.add(suspect(table, str(number), tenant))
    order = []
    for _ in range(4):
        [ready] = queue.take_ready()
        order.append(ready.request.tenant)
        table.remove(ready)
    assert order == ["many", "one", "many", "many"]


def test_tenant_whose_suspects_have_ended_is_as_new_as_any_other() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    first = suspect(table, "a", "known")
    queue.add(first)
    assert queue.take_ready() == [first]
    table.remove(first)
    assert queue.take_ready() == []
    known, new = suspect(table, "b", "known"), suspect(table, "c", "new")
    queue.add(known)
    queue.add(new)
    assert queue.take_ready() == [known]


def test_suspects_of_another_model_take_no_place() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    suspects = [suspect(table, name, model=model) for name, model in (("a", "m"), ("b", "n"), ("c", "m"))]
    for each in suspects:
        queue.add(each)
    assert queue.take_ready() == suspects[:2]
    assert queue.take_ready() == []
    assert [each.is_parked for each in suspects] == [False, False, True]


async def test_dead_letter_says_what_became_of_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    letters: list[DeadLetter] = []

    async def publish(nats: object, letter: DeadLetter) -> None:
        letters.append(letter)

    monkeypatch.setattr("gateway.dispatch.poison.publish_dead_letter", publish)
    reasons: Counter[str] = Counter()
    quarantine = Quarantine(None, "g", reasons)  # type: ignore[arg-type]
    flight = Flight(Request(id="a", model="m", text="x"), ListSink(), 1, 0.0, epoch=2, emitted=[7])
    flight.losses.append(Loss(Death("w", "m", "its heartbeats stopped", 5.0, is_blamed=True), 1, is_solo=True))
    error = quarantine.take(flight, "worker_lost", "It kills.")
    await quarantine.close()
    [letter] = letters
    death = flight.losses[0].death
    assert letter.attempts == (DeadAttempt("w", 1, death.time, "its heartbeats stopped"),)
    assert (letter.request.epoch, letter.request.emitted, letter.quarantined_by) == (2, (7,), "g")
    assert letter.reason == "worker_lost"
    assert reasons == {"worker_lost": 1}
    assert letter.error == error.message == "It kills. The request is in quarantine under the id a."
    assert error.headers["x-should-retry"] == "false"
