"""Room for leases: each row counts once, and tenants that wait get their share."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest

from gpu_worker.execution.tiers.host_tier import HostTier
from gpu_worker.execution.tiers.leases import GIVE_WAY_S, Lease, Leases
from tests.gpu_worker.execution.tiered_engine import Models

NUM_ROWS = 32
"""Of which leases hold half."""


class Granted:
    """Leases of contents that are kept for each."""

    def __init__(self, models: Models) -> None:
        groups = models.open("llama").block_contents
        self.row_bytes = groups[0].row_bytes
        self.host = HostTier(groups, NUM_ROWS * self.row_bytes)
        self.now = 0.0
        self.leases = Leases(self.host, 60.0, clock=lambda: self.now)
        self._numbers = itertools.count()

    def prompt(self, num_blocks: int) -> list[bytes]:
        """Keep contents that no other prompt has."""
        digests = [f"{next(self._numbers):032}".encode() for _ in range(num_blocks)]
        for digest in digests:
            batch = self.host.keep(0, [(0, digest, b"")])
            assert batch is not None
            batch.copy.wait()
            self.host.settle(batch)
        return digests

    def grant(self, name: str, num_blocks: int = 4, tenant: str = "") -> Lease | None:
        return self.leases.grant(name, 1, b"", self.prompt(num_blocks), tenant)

    def has_room(self, num_blocks: int = 4, tenant: str = "") -> bool:
        return self.leases.has_room(num_blocks * self.row_bytes, tenant)


@pytest.fixture
def granted(models: Models) -> Granted:
    return Granted(models)


def test_leases_that_nobody_reads_give_way_to_new_ones(granted: Granted) -> None:
    leases = granted.leases
    lost = [granted.grant(f"lost {number}") for number in range(4)]
    granted.now = GIVE_WAY_S
    assert not granted.has_room()
    assert granted.grant("early") is None
    granted.now += 1
    assert granted.has_room()
    first = granted.grant("first")
    assert first is not None
    assert lost[0] is not None
    assert lost[0].has_ended
    assert len(leases) == 4
    # Who decodes may only be behind: until one is opened, no other gives way so soon.
    granted.now += 1
    assert not granted.has_room()
    reader, other = socket.socketpair()
    with reader, other:
        assert leases.open(first.token, "first", 1, reader) is first
        # It was the latest, so the others were passed over.
        granted.now += GIVE_WAY_S / 2
        later = [granted.grant(f"later {number}") for number in range(3)]
        assert all(later)
        assert granted.grant("one more") is None, "one is read, and the others are new"
        assert not first.has_ended
        leases.close()
    assert leases.num_bytes == 0


def test_lease_that_was_passed_over_ends(granted: Granted) -> None:
    passed, opened, later = (granted.grant(name) for name in ("passed", "opened", "later"))
    assert passed is not None
    assert opened is not None
    assert later is not None
    opened.granted_at = 1.0
    later.granted_at = 2.0
    reader, other = socket.socketpair()
    with reader, other:
        assert granted.leases.open(opened.token, "opened", 1, reader) is opened
        granted.leases.sweep(GIVE_WAY_S)
        assert not passed.has_ended
        granted.leases.sweep(GIVE_WAY_S + 3.0)
        assert (passed.has_ended, opened.has_ended, later.has_ended) == (True, False, False)
        granted.leases.close()


def test_worker_that_drains_waits_for_leases_while_some_are_opened(granted: Granted) -> None:
    lease = granted.grant("unopened")
    assert lease is not None
    granted.now = GIVE_WAY_S
    waiting = threading.Thread(target=granted.leases.wait_for_end, args=(60.0,))
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive(), "it may be opened yet"
    granted.now += 1.0
    waiting.join(30.0)
    assert not waiting.is_alive()
    reader, other = socket.socketpair()
    with reader, other:
        assert granted.leases.open(lease.token, "unopened", 1, reader) is lease
        granted.now += 2 * GIVE_WAY_S
        granted.leases.wait_for_end(0.0)
        waiting = threading.Thread(target=granted.leases.wait_for_end, args=(60.0,))
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive(), "it is read"
        granted.leases.end(lease, was_read=True)
        waiting.join(30.0)
        assert not waiting.is_alive()


def test_choices_of_one_prompt_count_their_rows_once(granted: Granted) -> None:
    digests = granted.prompt(12)
    choices = [granted.leases.grant(f"choice {number}", 1, b"", digests, "many") for number in range(128)]
    assert all(choices)
    assert granted.leases.num_bytes == 12 * granted.row_bytes
    assert granted.has_room(4, "other")
    for choice in choices:
        assert choice is not None
        assert granted.leases.num_bytes == 12 * granted.row_bytes
        granted.leases.end(choice)
    assert granted.leases.num_bytes == 0
    assert len(granted.host._orders[0]) == 12, "all rows may be evicted"


def test_tenant_above_its_share_gives_way_at_once_to_one_below(granted: Granted) -> None:
    greedy = [granted.grant(f"greedy {number}", tenant="greedy") for number in range(4)]
    assert not granted.has_room(4, "greedy")
    assert not granted.has_room(9, "polite"), "more than half"
    polite = [granted.grant(f"polite {number}", tenant="polite") for number in range(2)]
    assert all(polite)
    assert [lease is not None and lease.has_ended for lease in greedy] == [False, False, True, True]
    assert not granted.has_room(4, "polite")
    assert not granted.has_room(4, "greedy")
    # Each of three has a third, and the first two have more.
    assert granted.grant("third", tenant="third") is not None
    assert granted.leases._use.num_bytes["third"] == 4 * granted.row_bytes


def test_lease_that_is_read_gives_way_to_no_tenant(granted: Granted) -> None:
    lease = granted.grant("greedy", 16, "greedy")
    assert lease is not None
    reader, other = socket.socketpair()
    with reader, other:
        assert granted.leases.open(lease.token, "greedy", 1, reader) is lease
        assert granted.grant("polite", 4, "polite") is None
        granted.leases.close()
