"""When NATS is suspected of being away: silence in rounds of this process, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest

from gateway.dispatch.nats_watch import (
    ANSWER_LOST_S,
    CALM_S,
    INTERVAL_S,
    MAX_SUSPECT_S,
    PING_AFTER_S,
    SUSPECT_S,
    NatsWatch,
)
from shared.direct_client import DirectClient

ROUND_S = 0.05


@dataclass
class Connection:
    """What a watch sees of a connection."""

    num_reads: int = 0
    is_connected: bool = True
    pings: list[asyncio.Future[bool]] = field(default_factory=list)
    _server_info: dict[str, Any] = field(default_factory=dict)

    async def ping(self) -> asyncio.Future[bool]:
        self.pings.append(asyncio.get_running_loop().create_future())
        return self.pings[-1]

    def say(self, *, answers: bool) -> None:
        """Let something come in from NATS, with the answer that it owes or without."""
        self.num_reads += 1
        for ping in self.pings:
            if answers and not ping.done():
                ping.set_result(True)


class Rounds:
    """A watch whose rounds follow one another in time."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.watch = NatsWatch(cast("DirectClient", self.connection))
        self.now = 100.0
        self.discounted_s: list[float] = []

    async def run(
        self, for_s: float, *, is_heard: bool = False, answers: bool = True, round_s: float = ROUND_S
    ) -> None:
        for _ in range(round(for_s / round_s)):
            self.now += round_s
            if is_heard:
                self.connection.say(answers=answers)
            if silent_s := await self.watch.review(self.now):
                self.discounted_s.append(silent_s)

    async def until_suspected(self) -> float:
        start = self.now
        while not self.watch.is_suspected:
            await self.run(ROUND_S)
            assert self.now < start + 10
        return self.now - start


@pytest.fixture
async def rounds() -> Rounds:
    rounds = Rounds()
    await rounds.run(1.0, is_heard=True)
    return rounds


async def test_silent_server_is_asked_once_and_suspected_within_a_second(
    rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    num_asked = len(rounds.connection.pings)
    assert 0.5 <= await rounds.until_suspected() <= 1.05
    assert len(rounds.connection.pings) - num_asked == 1
    assert (rounds.watch.refuses, rounds.watch.is_connected) == (True, False)
    await rounds.run(5.0)
    assert rounds.watch.is_suspected
    assert [message.startswith("NATS has been silent for ") for message in caplog.messages] == [True]


async def test_server_that_is_silent_from_the_start_is_suspected_as_soon() -> None:
    rounds = Rounds()
    assert await rounds.until_suspected() <= 1.1


async def test_idle_server_that_answers_is_not_suspected(rounds: Rounds) -> None:
    num_asked = len(rounds.connection.pings)
    for _ in range(20):
        await rounds.run(PING_AFTER_S + ROUND_S)
        await rounds.run(ROUND_S, is_heard=True)
    assert len(rounds.connection.pings) - num_asked == 20
    assert (rounds.watch.is_suspected, rounds.watch.is_late, rounds.discounted_s) == (False, False, [])


async def test_answer_that_was_asked_for_early_is_owed_from_then_on(rounds: Rounds) -> None:
    num_asked = len(rounds.connection.pings)
    await rounds.watch.ask()
    assert not rounds.watch.is_late
    await rounds.run(ROUND_S)
    assert rounds.watch.is_late
    await rounds.watch.ask()
    assert len(rounds.connection.pings) - num_asked == 1
    await rounds.run(ROUND_S, is_heard=True)
    assert not rounds.watch.is_late
    # It came soon enough to be no silence, and the next one is owed anew.
    assert rounds.discounted_s == []
    await rounds.watch.ask()
    assert len(rounds.connection.pings) - num_asked == 2
    rounds.connection.is_connected = False
    await rounds.run(ROUND_S)
    await rounds.watch.ask()
    assert len(rounds.connection.pings) - num_asked == 2


async def test_anything_that_is_heard_ends_the_suspicion_and_counts_as_no_silence(rounds: Rounds) -> None:
    await rounds.until_suspected()
    await rounds.run(1.0)
    assert rounds.watch.is_late
    await rounds.run(ROUND_S, is_heard=True)
    assert (rounds.watch.is_suspected, rounds.watch.is_late, rounds.watch.is_connected) == (False, False, True)
    assert rounds.discounted_s == [pytest.approx(2.0, abs=0.1)]


async def test_false_alarm_makes_the_next_one_come_later_until_it_has_been_quiet_for_long(rounds: Rounds) -> None:
    delays_s = []
    for _ in range(4):
        delays_s.append(await rounds.until_suspected())
        await rounds.run(0.2, is_heard=True)
    longer_s = [later - earlier for earlier, later in pairwise(delays_s)]
    assert longer_s[:2] == [pytest.approx(SUSPECT_S, abs=0.06), pytest.approx(2 * SUSPECT_S, abs=0.06)]
    assert delays_s[-1] == pytest.approx(PING_AFTER_S + MAX_SUSPECT_S, abs=0.11)
    await rounds.run(CALM_S + 1, is_heard=True)
    assert await rounds.until_suspected() == pytest.approx(delays_s[0], abs=0.11)


async def test_suspicion_of_not_being_heard_stands_until_the_end_of_the_connection_is_told(rounds: Rounds) -> None:
    await rounds.run(INTERVAL_S + ANSWER_LOST_S + 2 * ROUND_S, is_heard=True, answers=False)
    assert rounds.watch.is_suspected
    rounds.connection.is_connected = False
    await rounds.run(0.5)
    assert rounds.watch.is_suspected
    rounds.watch.disconnected()
    assert not rounds.watch.is_suspected


async def test_suspicion_that_comes_true_makes_the_next_one_no_later(rounds: Rounds) -> None:
    first_s = await rounds.until_suspected()
    rounds.connection.is_connected = False
    await rounds.run(0.5)
    # The end of the connection is not known yet: the suspicion stands.
    assert rounds.watch.is_suspected
    rounds.watch.disconnected()
    assert not rounds.watch.is_suspected
    await rounds.run(5.0)
    assert not rounds.watch.is_suspected
    rounds.connection.is_connected = True
    await rounds.run(ROUND_S, is_heard=True)
    assert await rounds.until_suspected() == pytest.approx(first_s, abs=0.11)


async def test_time_in_which_this_process_stood_still_is_no_silence(rounds: Rounds) -> None:
    # It gets a turn once in five seconds, too seldom to read what has come.
    await rounds.run(40.0, round_s=5.0)
    assert not rounds.watch.is_suspected
    await rounds.run(ROUND_S, is_heard=True)
    await rounds.run(PING_AFTER_S + SUSPECT_S - 2 * ROUND_S)
    rounds.watch.forget()
    await rounds.run(PING_AFTER_S + SUSPECT_S - 2 * ROUND_S)
    assert not rounds.watch.is_suspected


async def test_server_with_others_beside_it_is_suspected_and_refuses_nothing(rounds: Rounds) -> None:
    rounds.connection._server_info["cluster"] = "headrace"
    await rounds.until_suspected()
    assert not rounds.watch.refuses


async def test_server_that_is_heard_and_does_not_answer_is_suspected_until_it_does(rounds: Rounds) -> None:
    await rounds.run(ANSWER_LOST_S - ROUND_S, is_heard=True, answers=False)
    assert not rounds.watch.is_suspected
    assert rounds.watch.owes_answer
    await rounds.run(INTERVAL_S + 2 * ROUND_S, is_heard=True, answers=False)
    assert (rounds.watch.refuses, rounds.watch.is_connected) == (True, False)
    await rounds.run(30.0, is_heard=True, answers=False)
    assert rounds.watch.is_suspected
    await rounds.run(2 * ROUND_S, is_heard=True)
    assert (rounds.watch.is_suspected, rounds.watch.owes_answer) == (False, False)


@pytest.mark.parametrize("ending", ["disconnected", "forget"])
async def test_answer_that_a_lost_connection_or_a_pause_kept_away_is_not_owed(rounds: Rounds, ending: str) -> None:
    for _ in range(5):
        await rounds.run(ANSWER_LOST_S - 2 * ROUND_S, is_heard=True, answers=False)
        getattr(rounds.watch, ending)()
    assert not rounds.watch.is_suspected
    await rounds.run(INTERVAL_S + ANSWER_LOST_S + 2 * ROUND_S, is_heard=True, answers=False)
    assert rounds.watch.is_suspected


async def test_what_is_awaited_while_an_answer_is_late_is_not_lost(rounds: Rounds) -> None:
    await rounds.run(INTERVAL_S, is_heard=True, answers=False)
    assert not rounds.watch.is_late
    await rounds.run(1.0, is_heard=True, answers=False)
    # Nothing is moved, and no worker is taken for dead, for what does not come meanwhile.
    assert rounds.watch.is_late
    await rounds.run(ROUND_S, is_heard=True)
    assert not rounds.watch.is_late
    assert rounds.discounted_s == [pytest.approx(1.5, abs=0.2)]


async def test_server_is_asked_twice_a_second_while_it_is_heard(rounds: Rounds) -> None:
    num_asked = len(rounds.connection.pings)
    await rounds.run(30.0, is_heard=True)
    assert 50 <= len(rounds.connection.pings) - num_asked <= 60
