from __future__ import annotations

import io
import logging

import pytest

from gpu_worker.execution.start_up import Stage
from gpu_worker.start.progress_bar import LOG_EVERY_S, ProgressBar
from tests.clock import Clock

GB = 10**9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_terminal_shows_a_bar_that_is_drawn_over_itself(clock: Clock) -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal, clock)
    for done in (1, 2, 4):
        clock.now += 0.5
        bar(Stage.LOAD, done * GB, 4 * GB)
    lines = terminal.getvalue().split("\r\x1b[K")[1:]
    assert lines[-1] == f"loading weights  [{'#' * 30}] 4.00 GB of 4.00 GB 3.0 GB/s\n"
    assert lines[1].startswith(f"loading weights  [{'#' * 15}{'.' * 15}] 2.00 GB of 4.00 GB")
    assert not lines[1].endswith("\n")


def test_terminal_is_not_drawn_on_for_every_tensor(clock: Clock) -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal, clock)
    for done in range(1, 1001):
        clock.now += 0.001
        bar(Stage.CAPTURE, done, 1000)
    assert 8 <= terminal.getvalue().count("\r") <= 12
    assert terminal.getvalue().endswith("1000 of 1000\n")


def test_each_stage_ends_its_line(clock: Clock) -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal, clock)
    bar(Stage.PROFILE, 2, 2)
    bar(Stage.CAPTURE, 2, 2)
    titles = [line.split("\x1b[K")[1][:17].strip() for line in terminal.getvalue().splitlines(keepends=False) if line]
    assert titles == ["measuring memory", "capturing graphs"]


def test_log_gets_a_line_every_few_seconds(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    bar = ProgressBar(stream, clock)
    for second in range(1, 8):
        clock.now += 1
        bar(Stage.LOAD, second * GB, 7 * GB)
    assert stream.getvalue() == ""
    assert [(record.message, record.__dict__["done"], record.__dict__["percent"]) for record in caplog.records] == [
        ("loading weights", "3.00 GB", 42),
        ("loading weights", "5.00 GB", 71),
    ]
    assert {record.__dict__["of"] for record in caplog.records} == {"7.00 GB"}


def test_quick_start_leaves_no_line_in_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bar = ProgressBar(io.StringIO(), clock)
    for done in range(1, 11):
        clock.now += LOG_EVERY_S / 20
        bar(Stage.LOAD, done, 10)
    assert not caplog.records


def test_compiling_is_told_at_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ProgressBar(io.StringIO(), clock)(Stage.COMPILE, 0, 9)
    assert [record.message for record in caplog.records] == ["compiling kernels, once"]
