from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios

import pytest

from ops.cli.status_line import REDRAW_S, TELL_EVERY_S, StatusLine
from tests.clock import Clock


def test_terminal_shows_a_line_that_is_cut_and_drawn_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 6, 0, 0))
    with open(writing, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        clock = Clock()
        line = StatusLine(clock)
        for text in ("first", "too soon"):
            line.show(text)
        clock.now += 2 * REDRAW_S
        line.show("longer than it is")
        line.clear()
        expected, shown = b"\r\x1b[Kfirst\r\x1b[Klonge\r\x1b[K", b""
        while len(shown) < len(expected) and select.select([reading], [], [], 60)[0]:
            shown += os.read(reading, 1000)
        assert shown == expected
    os.close(reading)


def test_no_terminal_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(clock)
    for number in range(5):
        line.show(f"at {number}")
        clock.now += TELL_EVERY_S / 2
    line.clear()
    assert capsys.readouterr().err == "at 2\nat 4\n"
