"""What a gateway remembers of one key: what runs, and what Redis has yet to be told."""

from __future__ import annotations

import pytest

from gateway.admission.limit_account import BATCH_S, WINDOW_S, KeyAccount, KeyUsage, Limits, Verdict


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


OPEN = Limits(None, None, None)


@pytest.fixture
def usage() -> KeyUsage:
    return KeyUsage()


def admit(usage: KeyUsage, now: float, limits: Limits = OPEN, tokens: int = 0, sequences: int = 1) -> Verdict:
    return usage.admit(now, limits, tokens, sequences)[0]


def test_admissions_within_a_second_are_one_batch(usage: KeyUsage) -> None:
    first = usage.admit(10.0, OPEN, 5, 1)[1]
    assert usage.admit(10.9, OPEN, 6, 2)[1] is first
    second = usage.admit(11.0, OPEN, 7, 1)[1]
    assert second is not first
    assert first is not None
    assert second is not None
    assert (first.first, first.last, first.requests, first.tokens) == (10.0, 10.9, 2, 11)
    assert (second.requests, second.tokens) == (1, 7)
    assert (usage.requests, usage.tokens, usage.running) == (3, 18, 4)
    # A clock that goes back moves no batch.
    usage.record(10.5, 0, 0)
    assert second.last == 11.0


def test_batch_leaves_a_minute_behind_its_last_admission(usage: KeyUsage) -> None:
    admit(usage, 10.0, tokens=5)
    admit(usage, 10.5, tokens=6)
    usage.forget_before(10.4)
    assert (usage.requests, usage.tokens) == (2, 11)
    batch = usage.batches[0]
    assert admit(usage, 10.5 + WINDOW_S, tokens=1) == Verdict(None, 0.0, 1, 1, WINDOW_S)
    assert not batch.is_in_window
    usage.adjust(batch, 100)
    assert usage.tokens == 1
    usage.adjust(usage.batches[0], 100)
    assert (usage.tokens, usage.batches[0].tokens) == (101, 101)


@pytest.mark.parametrize(
    ("limits", "tokens", "exceeded", "retry_after_s"),
    [
        (Limits(4, None, None), 0, None, 0.0),
        # The batch of two leaves at 70.5, the single one at 72.
        (Limits(2, None, None), 0, "requests", 50.5),
        (Limits(1, None, None), 0, "requests", 52.0),
        (Limits(0, None, None), 0, "requests", WINDOW_S),
        (Limits(None, 40, None), 10, None, 0.0),
        (Limits(None, 39, None), 10, "tokens", 50.5),
        (Limits(None, 20, None), 10, "tokens", 50.5),
        (Limits(None, 19, None), 10, "tokens", 52.0),
        (Limits(None, 9, None), 10, "tokens", WINDOW_S),
        # The longer wait is told.
        (Limits(2, 19, None), 10, "tokens", 52.0),
        (Limits(0, 19, None), 10, "requests", WINDOW_S),
        (Limits(None, None, 3), 0, "concurrency", 0.0),
        (Limits(None, None, 4), 0, None, 0.0),
        # Who has to wait for the window is told of that first.
        (Limits(2, None, 3), 0, "requests", 50.5),
    ],
)
def test_limit_in_the_way_is_told_with_the_time_at_which_it_is_not(
    usage: KeyUsage, limits: Limits, tokens: int, exceeded: str | None, retry_after_s: float
) -> None:
    admit(usage, 10.0, tokens=10)
    admit(usage, 10.5, tokens=10)
    admit(usage, 12.0, tokens=10)
    verdict = admit(usage, 20.0, limits, tokens)
    assert (verdict.exceeded, verdict.retry_after_s) == (exceeded, retry_after_s)
    if exceeded is None:
        assert (verdict.requests, verdict.tokens, verdict.reset_s) == (4, 30 + tokens, WINDOW_S)
        assert usage.running == 4
    else:
        assert (verdict.requests, verdict.tokens, verdict.reset_s) == (3, 30, 52.0)
        assert usage.running == 3


def test_refusal_of_an_unused_key_leaves_nothing_behind(usage: KeyUsage) -> None:
    verdict, batch = usage.admit(10.0, Limits(None, 5, None), 6, 1)
    assert (verdict, batch) == (Verdict("tokens", WINDOW_S, 0, 0, 0.0), None)
    assert not usage.batches
