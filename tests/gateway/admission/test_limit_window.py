"""One key's sliding minute, by a clock that the test turns."""

from __future__ import annotations

import pytest

from gateway.admission.limit_window import WINDOW_S, KeyUsage, Limits, Verdict

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
