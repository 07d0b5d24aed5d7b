"""Lines of requests: no more a second than allowed, and dropped ones are counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import pytest

from shared.request_log import RequestLog, is_slow


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


def test_lines_of_problems_and_of_jobs_have_numbers_of_their_own(lines: list[logging.LogRecord]) -> None:
    now = [100.0]
    log = RequestLog(logging.getLogger("tests.requests"), 2.0, lambda: now[0])
    for number in range(600):
        log.write("request", partial(dict, number=number), "batch")
    for number in range(38):
        log.write("request", partial(dict, number=1000 + number))
    log.write("request", partial(dict, number=2000), "problem")
    assert [line.number for line in lines] == [0, 1, 1000, 1001, 2000]  # type: ignore[attr-defined]
    assert [getattr(line, "left_out", 0) for line in lines] == [0, 0, 598, 0, 36]
    # Lines dropped after the last one are counted at the end.
    log.write("request", fail, "batch")
    log.close()
    assert (lines[-1].message, lines[-1].left_out) == ("requests without a line", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ttft_s", "total_s", "expected"), [(None, 1.0, False), (0.1, 59.0, False), (5.0, 6.0, True), (0.1, 60.0, True)]
)
def test_slow_is_a_late_first_token_or_a_long_answer(ttft_s: float | None, total_s: float, expected: bool) -> None:
    assert is_slow(ttft_s, total_s) is expected
