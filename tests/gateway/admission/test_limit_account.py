"""What a gateway remembers of one key: what runs, and what Redis has yet to be told."""

from __future__ import annotations

import pytest

from gateway.admission.limit_account import KeyAccount
from gateway.admission.limit_window import BATCH_S, WINDOW_S


@pytest.fixture
def account() -> KeyAccount:
    return KeyAccount()


def begin(account: KeyAccount, lease: str, now: float, num_sequences: int = 1) -> None:
    account.usage.running += num_sequences
    account.holds.begin(lease, now, num_sequences)


def test_running_sequences_are_those_that_run_and_those_that_are_asked_about(account: KeyAccount) -> None:
    begin(account, "a", 0.0, 3)
    account.num_pending = 2
    assert account.running == 5
    account.end("a", 1.0)
    assert (account.running, account.usage.running) == (2, 0)


@pytest.mark.parametrize("is_counted", [False, True])
def test_end_is_told_to_redis_only_where_sequences_are_limited(account: KeyAccount, is_counted: bool) -> None:
    account.is_counted = is_counted
    begin(account, "a", 0.0)
    account.end("a", 1.0)
    assert account.is_dirty is is_counted
    account.is_dirty = True
    begin(account, "b", 0.0)
    account.end("b", 1.0)
    assert account.is_dirty


def test_corrections_of_a_batch_add_up_and_are_sent_until_confirmed(account: KeyAccount) -> None:
    assert account.corrections(1) == (0, [])
    account.correct(5_000, -30, 10.0)
    account.correct(6_000, 7, 10.0)
    account.correct(5_000, 10, 10.0)
    assert account.is_dirty
    assert account.corrections(1) == (1, [5_000, -20, 6_000, 7])
    account.correct(7_000, 1, 10.0)
    # Those under way are stated again, under their own number.
    assert account.corrections(2) == (1, [5_000, -20, 6_000, 7])
    account.is_dirty = False
    account.confirm(2, 3.0)
    assert account.corrections(2) == (1, [5_000, -20, 6_000, 7])
    account.confirm(1, 2.0)
    assert (account.stated_at, account.is_dirty) == (3.0, True)
    assert account.corrections(2) == (2, [7_000, 1])
    account.is_dirty = False
    account.confirm(2, 4.0)
    assert (account.corrections(3), account.is_dirty, account.stated_at) == ((0, []), False, 4.0)


def test_corrections_of_batches_that_have_left_the_window_are_forgotten(account: KeyAccount) -> None:
    now = 1_000.0
    oldest_ms = int((now - WINDOW_S - BATCH_S) * 1000)
    account.correct(oldest_ms - 1, 5, now - 30)
    account.correct(oldest_ms + 1, 6, now - 30)
    account.correct(int(now * 1000), 7, now)
    assert account.corrections(1) == (1, [oldest_ms + 1, 6, int(now * 1000), 7])


def test_account_is_idle_when_nothing_would_be_lost(account: KeyAccount) -> None:
    assert account.is_idle
    begin(account, "a", 0.0)
    assert not account.is_idle
    account.end("a", 1.0)
    assert account.is_idle
    for name, busy, idle in (("num_calls", 1, 0), ("is_dirty", True, False)):
        setattr(account, name, busy)
        assert not account.is_idle
        setattr(account, name, idle)
    account.correct(5_000, 1, 5.0)
    account.is_dirty = False
    assert not account.is_idle
    account.corrections(1)
    assert not account.is_idle
    account.confirm(1, 1.0)
    assert account.is_idle
    account.usage.record(0.0, 1, 0)
    assert not account.is_idle


def test_account_of_a_request_without_sequences_is_not_idle(account: KeyAccount) -> None:
    begin(account, "a", 0.0, 0)
    assert not account.is_idle
    account.end("a", 1.0)
    assert account.is_idle
