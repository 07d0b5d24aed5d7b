"""Who may stay when there are too many connections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.http1.connection_table import (
    MAX_EXTRA_CONNECTIONS,
    MIN_WAIT_S,
    SWEEP_INTERVAL_S,
    ConnectionLimits,
    ConnectionTable,
)
from tests.clock import Clock


class Member:
    """A connection that does what it is told."""

    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.is_limited = False
        self.told: list[str] = []
        self.postponed_s = 0.0
        self.num_unread = 0

    def has_unread_bytes(self) -> bool:
        return self.num_unread > 0

    def evict(self) -> None:
        self.told.append("evict")

    def drain(self) -> None:
        self.told.append("drain")

    def postpone(self, seconds: float) -> None:
        self.postponed_s += seconds

    def expire(self, now: float) -> None:
        self.told.append("expire")


LIMITS = ConnectionLimits(max_connections=4)


class Table:
    """A table and its clock, which goes on by a second with each connection: all before have had time to send."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.clock = Clock(0.0)
        self.table: ConnectionTable[Member] = ConnectionTable(limits, self.clock)

    @property
    def num_busy(self) -> int:
        return len(self.table.members) - len(self.table._waiting) - len(self.table._waiting_extra)

    def add(self, address: str = "a") -> Member:
        self.clock.now += 1
        member = Member(address)
        member.is_limited = self.table.add(member)
        return member

    def fill_with_busy(self) -> list[Member]:
        members = [self.add() for _ in range(LIMITS.max_connections)]
        for member in members:
            self.table.note_busy(member)
        return members


@pytest.fixture
def table() -> Table:
    return Table()


def test_connection_whose_bytes_were_not_read_yet_makes_no_room(table: Table) -> None:
    members = [table.add() for _ in range(LIMITS.max_connections)]
    members[0].num_unread = members[1].num_unread = 100
    assert not table.add().is_limited
    assert [member.told for member in members] == [[], [], ["evict"], []]
    for member in table.table.members:
        member.num_unread = 1
    assert table.table.num_places == 0


def test_connection_that_is_one_too_many_makes_no_room_while_it_sends_its_body(table: Table) -> None:
    table.fill_with_busy()
    limited = table.add()
    table.table.note_busy(limited)
    table.table.note_receiving(limited)
    assert table.add().is_limited
    assert limited.told == []


def test_oldest_waiting_connection_makes_room(table: Table) -> None:
    members = [table.add() for _ in range(4)]
    table.table.note_busy(members[0])
    assert not table.add().is_limited
    assert [member.told for member in members] == [[], ["evict"], [], []]
    assert table.table.num_evicted == 1


def test_burst_does_not_close_connections_that_had_no_time_to_send(table: Table) -> None:
    burst = [Member() for _ in range(4)]
    for number, member in enumerate(burst):
        assert table.table.num_places == 4 - number
        member.is_limited = table.table.add(member)
    # A client that comes now waits until these have sent their requests or had the time to.
    assert table.table.num_places == 0
    table.clock.now += MIN_WAIT_S
    assert table.table.num_places == 1
    table.table.note_busy(burst[0])
    table.add()
    assert [member.told for member in burst] == [[], ["evict"], [], []]


def test_place_beyond_the_limit_is_for_a_refusal_while_all_are_busy(table: Table) -> None:
    members = [Member() for _ in range(4 + MAX_EXTRA_CONNECTIONS)]
    for number, member in enumerate(members):
        assert table.table.num_places == (4 if number < 4 else len(members)) - number
        member.is_limited = table.table.add(member)
        table.table.note_busy(member)
    assert [member.is_limited for member in members] == [False] * 4 + [True] * MAX_EXTRA_CONNECTIONS
    assert table.table.num_places == 0
    table.table.note_receiving(members[3])
    table.table.note_waiting(members[9])
    assert table.table.num_places == 0
    table.clock.now += MIN_WAIT_S
    assert table.table.num_places == 1
    assert [table.add().is_limited, table.add().is_limited] == [True, True]
    assert [number for number, member in enumerate(members) if member.told] == [3, 9]


def test_connection_that_was_answered_lately_is_evicted_last(table: Table) -> None:
    members = [table.add() for _ in range(4)]
    table.table.note_busy(members[0])
    table.table.note_waiting(members[0])
    for _ in range(3):
        table.add()
    assert [member.told for member in members] == [[], ["evict"], ["evict"], ["evict"]]


def test_busy_connections_are_never_evicted(table: Table) -> None:
    members = table.fill_with_busy()
    extra = [table.add() for _ in range(MAX_EXTRA_CONNECTIONS + 1)]
    assert all(member.is_limited for member in extra)
    assert table.table.num_limited == len(extra)
    assert [member.told for member in members] == [[]] * 4
    assert [member.told for member in extra[:2]] == [["evict"], []]
    assert len(table.table.members) == 4 + MAX_EXTRA_CONNECTIONS
    assert table.num_busy == 4


def test_receiving_connections_make_room_where_none_waits(table: Table) -> None:
    answering, *receiving, waiting = [table.add() for _ in range(4)]
    for member in (answering, *receiving):
        table.table.note_busy(member)
    for member in receiving:
        table.table.note_receiving(member)
    newcomers = [table.add() for _ in range(3)]
    assert waiting.told == ["evict"]
    for member in newcomers:
        table.table.note_busy(member)
    assert [member.told for member in receiving] == [[], []]
    newcomers += [table.add()]
    table.table.note_busy(newcomers[-1])
    assert [member.told for member in receiving] == [["evict"], []]
    table.table.note_busy(receiving[1])
    assert table.add().is_limited
    assert (answering.told, receiving[1].told) == ([], [])


def test_freed_place_is_given_to_the_next_connection(table: Table) -> None:
    members = table.fill_with_busy()
    extra = table.add()
    table.table.remove(members[0])
    table.table.remove(extra)
    assert not table.add().is_limited


def test_address_has_its_own_limit() -> None:
    table = Table(replace(LIMITS, max_per_address=2))
    first = [table.add("a") for _ in range(3)]
    assert [member.is_limited for member in first] == [False, False, True]
    assert not table.add("b").is_limited
    for member in (first[0], first[0], first[2]):
        table.table.remove(member)
    assert [table.add("a").is_limited for _ in range(2)] == [False, True]


def test_connection_may_be_removed_twice(table: Table) -> None:
    member = table.add()
    table.table.remove(member)
    table.table.remove(member)
    table.table.note_waiting(member)
    assert (len(table.table.members), table.num_busy) == (0, 0)


def test_drain_tells_those_who_wait(table: Table) -> None:
    waiting, busy = table.add(), table.add()
    table.table.note_busy(busy)
    table.table.drain()
    assert (waiting.told, busy.told, table.table.is_draining) == (["drain"], [], True)


def test_late_sweep_gives_every_client_the_time_it_lost(table: Table) -> None:
    member = table.add()
    table.clock.now = 0.5
    table.table.sweep()
    assert member.postponed_s == 0
    table.clock.now = 60.5
    table.table.sweep()
    assert member.postponed_s == 60 - SWEEP_INTERVAL_S
    assert member.told == ["expire", "expire"]


def test_addresses_without_a_connection_are_forgotten() -> None:
    table = Table()
    for number in range(10):
        table.table.remove(table.add(f"10.0.0.{number}"))
    assert not table.table._num_per_address


def test_limited_connection_that_waits_again_makes_room_for_limited_ones_only() -> None:
    table = Table()
    table.fill_with_busy()
    extra = table.add()
    assert extra.is_limited
    table.table.note_busy(extra)
    assert table.num_busy == 5
    table.table.note_waiting(extra)
    assert table.num_busy == 4
    assert table.add().is_limited
    assert extra.told == []
    for _ in range(MAX_EXTRA_CONNECTIONS - 1):
        table.add()
    assert extra.told == ["evict"]


def test_answers_have_the_date_of_the_last_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 784111777.0)
    table = Table()
    assert table.table.default_headers == [(b"date", b"Sun, 06 Nov 1994 08:49:37 GMT")]
    monkeypatch.setattr("time.time", lambda: 784111778.0)
    table.table.sweep()
    assert table.table.default_headers == [(b"date", b"Sun, 06 Nov 1994 08:49:38 GMT")]


def test_evictions_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    for _ in range(7):
        table.add()
    table.table.sweep()
    assert [getattr(record, "num", None) for record in caplog.records] == [3]
    table.table.sweep()
    table.add()
    table.table.sweep()
    assert [getattr(record, "num", None) for record in caplog.records] == [3, 1]
