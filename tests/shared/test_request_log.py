"""Lines of requests: no more a second than wanted, and what is left out is counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest

from shared.request_log import RequestLog


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    logger, kept = logging.getLogger("tests.requests"), Kept()
    logger.setLevel("INFO")
    logger.addHandler(kept)
    yield kept.records
    logger.removeHandler(kept)


def fail() -> dict[str, object]:
    raise AssertionError("fields of a line that is not written")


def test_burst_is_cut_and_the_next_line_says_by_how_many(lines: list[logging.LogRecord]) -> None:
    now = [100.0]
    log = RequestLog(logging.getLogger("tests.requests"), 5.0, lambda: now[0])
    for number in range(12):
        log.write("request", partial(dict, number=number, nothing=None))
    assert [line.number for line in lines] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert not hasattr(lines[0], "nothing")
    now[0] += 0.2
    log.write("request", partial(dict, number=12))
    log.write("request", fail)
    assert [line.number for line in lines[5:]] == [12]  # type: ignore[attr-defined]
    assert lines[5].left_out == 7  # type: ignore[attr-defined]
    now[0] += 3600
    for _ in range(9):
        log.write("request", dict)
    assert len(lines) == 6 + 5
    assert [getattr(line, "left_out", 0) for line in lines[6:]] == [1, 0, 0, 0, 0]


def test_less_than_one_line_a_second_is_possible(lines: list[logging.LogRecord]) -> None:
    now = [0.0]
    log = RequestLog(logging.getLogger("tests.requests"), 0.1, lambda: now[0])
    now[0] = 11.0
    log.write("request", dict)
    log.write("request", dict)
    assert len(lines) == 1


def test_zero_writes_nothing_and_collects_nothing(lines: list[logging.LogRecord]) -> None:
    log = RequestLog(logging.getLogger("tests.requests"), 0)
    log.write("request", fail)
    assert lines == []
