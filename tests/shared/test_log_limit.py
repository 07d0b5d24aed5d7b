"""One line a minute for each sender, and none lost from the count."""

from __future__ import annotations

import logging

import pytest

from shared.log_limit import LogLimit
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> LogLimit:
    return LogLimit(logging.getLogger("tests.log_limit"), clock=clock)


def test_many_lines_of_one_sender_become_one_a_minute_that_counts_the_others(
    limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(500):
        limit.warning("a", "junk: %s", "x")
    assert caplog.messages == ["junk: x"]
    clock.now += 61
    limit.warning("a", "junk: %s", "y")
    limit.warning("a", "junk: %s", "y")
    clock.now += 61
    limit.warning("a", "junk: %s", "z")
    assert caplog.messages[1:] == [
        "junk: y (and 499 more that were not logged)",
        "junk: z (and 1 more that were not logged)",
    ]


def test_noisy_sender_does_not_hide_another(limit: LogLimit, caplog: pytest.LogCaptureFixture) -> None:
    limit.warning("a", "junk of a")
    limit.warning("a", "junk of a")
    limit.warning("b", "junk of b")
    assert caplog.messages == ["junk of a", "junk of b"]


def test_thousands_of_senders_share_a_line(limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20_000):
        limit.warning(f"s{number}", "junk")
    assert len(caplog.messages) == 101
    clock.now += 61
    for number in range(20_000, 40_000):
        limit.warning(f"s{number}", "junk")
    # Those of a minute ago make room.
    assert len(caplog.messages) == 2 * 101
