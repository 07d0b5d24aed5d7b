"""The table of flights: what is counted where, and what the next attempt asks for."""

from __future__ import annotations

import msgspec
import pytest

from gateway.dispatch.inflight import Flight, FlightTable
from gateway.errors import ApiError
from shared.messages import Delta, Request
from shared.sampling import Sampling


class NullSink:
    def deliver(self, delta: Delta) -> None:
        pass

    def fail(self, error: ApiError) -> None:
        pass


def flight(request_id: str, tokens: int = 10, model: str = "m") -> Flight:
    return Flight(Request(id=request_id, model=model, text="x"), NullSink(), tokens, 0.0)


def test_claimed_request_counts_until_its_workers_next_heartbeat() -> None:
    table = FlightTable()
    first, second = flight("a"), flight("b", 5)
    table.add(first)
    table.add(second)
    assert table.unclaimed() == table.unshown("m") == table.unclaimed_of()["m"] == (2, 15)
    table.claim(first, "w")
    assert table.unclaimed() == (1, 5)
    assert table.unshown("m") == (2, 15)
    table.note_heartbeat("m", "w")
    assert table.unshown("m") == (1, 5)
    table.remove(first)
    assert table.unshown("m") == (1, 5)


def test_request_that_ends_before_the_heartbeat_counts_no_more() -> None:
    table = FlightTable()
    one = flight("a")
    table.add(one)
    table.claim(one, "w")
    assert table.remove(one)
    assert not table.remove(one)
    assert table.unshown("m") == (0, 0)


def test_released_request_waits_again_once() -> None:
    table = FlightTable()
    one = flight("a")
    table.add(one)
    table.claim(one, "w")
    table.release(one)
    table.release(one)
    table.forget_worker("w")
    assert table.unclaimed() == table.unshown("m") == (1, 10)


def test_models_are_counted_apart() -> None:
    table = FlightTable()
    table.add(flight("a"))
    table.add(flight("b", 3, "other"))
    assert table.unshown("other") == (1, 3)
    assert table.unclaimed() == (2, 13)


@pytest.mark.parametrize(("emitted", "has_prompt_output"), [([7, 8], False), ([], True)])
def test_next_attempt_continues_after_what_was_emitted(emitted: list[int], has_prompt_output: bool) -> None:
    one = flight("a")
    sampling = Sampling(prompt_logprobs=2)
    one.request = Request(id="a", model="m", text="x", echo=True, sampling=sampling, return_prompt_token_ids=True)
    assert one.attempt() == one.request
    one.probation = 5
    assert one.attempt() == msgspec.structs.replace(one.request, probation=5)
    one.probation, one.emitted = 0, [7]
    assert one.attempt().emitted == (7,)
    one.epoch, one.emitted, one.has_prompt_output = 2, emitted, has_prompt_output
    attempt = one.attempt()
    assert (attempt.epoch, attempt.emitted, attempt.echo) == (2, tuple(emitted), False)
    assert attempt.sampling.prompt_logprobs is None
    assert not attempt.return_prompt_token_ids


def test_claimed_request_is_awaited_until_its_attempt_produces_something() -> None:
    table = FlightTable()
    one, other = flight("a"), flight("b", 5)
    for each in (one, other):
        table.add(each)
    assert table.awaited() == {}
    table.claim(one, "w")
    table.claim(other, "w")
    assert table.awaited() == {"m": (2, 15)}
    table.note_output(one)
    table.note_output(one)
    assert table.awaited() == {"m": (1, 5)}
    # Its worker dies, and the next one has to begin anew.
    table.release(one)
    assert table.awaited() == {"m": (1, 5)}
    table.claim(one, "w2")
    assert table.awaited() == {"m": (2, 15)}
    table.remove(one)
    table.remove(other)
    assert table.awaited() == {}
