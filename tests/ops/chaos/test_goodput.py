"""What a worker could have made: by its steps, and not by what it was given."""

from __future__ import annotations

import msgspec
import pytest

from ops.chaos.ledger import Choice, Entry, Ledger
from ops.chaos.observer import Seen
from ops.chaos.scenarios.clients import Goodput, possible_per_s, tokens_within
from tests.gateway.fleet.test_fleet import BEAT


def heartbeats(*steps_and_running: tuple[int, int]) -> list[Seen]:
    return [
        Seen(msgspec.structs.replace(BEAT, step=step, running=running), 100.0 + 0.2 * number)
        for number, (step, running) in enumerate(steps_and_running)
    ]


def test_half_empty_steps_count_as_full_ones() -> None:
    assert possible_per_s(heartbeats((0, 8), (20, 8), (40, 8)), 8) == pytest.approx(800)
    assert possible_per_s(heartbeats((0, 4), (20, 4), (40, 4)), 8) == pytest.approx(800)


def test_slow_machine_could_do_less_and_an_idle_one_more_than_it_did() -> None:
    assert possible_per_s(heartbeats((0, 8), (10, 8), (20, 8)), 8) == pytest.approx(400)
    # No work in half of the time: what it did in the other half it could have done in this one too.
    assert possible_per_s(heartbeats((0, 8), (10, 0), (10, 0), (30, 8)), 8) == pytest.approx(8 * 30 / 0.6 / 0.5)


def test_share_is_that_of_the_possible() -> None:
    assert Goodput(380.0, 400.0).share == pytest.approx(0.95)
    assert possible_per_s(heartbeats((0, 0), (0, 0)), 8) == 0.0


def test_tokens_count_where_they_came_and_not_where_their_answer_ended() -> None:
    ledger = Ledger()
    for first_at, finish in ((8.0, "length"), (9.5, "length"), (11.5, "length"), (13.0, "length"), (10.0, "")):
        entry = Entry(0, "gateway-0", first_at, status=200, first_at=first_at, last_at=first_at + 1.0, num_done=1)
        entry.completion_tokens, entry.ended_at = 40, first_at + 1.0
        entry.choices[0] = Choice(finishes=[finish] if finish else [])
        ledger.entries.append(entry)
    # It ended without a token, and nobody said how many there were.
    ledger.entries.append(Entry(0, "gateway-0", 10.0, status=200, num_done=1, ended_at=11.0))
    # Half of the second and half of the third; the last one is no right answer.
    assert tokens_within(ledger, 10.0, 12.0) == pytest.approx(40.0)
