from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Iterator

import pytest

from ops.cli.lost_interrupts import interrupts_kept


class Thing:
    """Something that can be referred to weakly."""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever runs the tests in the background may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_in_a_callback_comes_again() -> None:
    def interrupted(_: weakref.ref[Thing]) -> None:
        raise KeyboardInterrupt

    things = [Thing()]
    reference = weakref.ref(things[0], interrupted)
    with interrupts_kept():
        things.clear()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
    assert reference() is None


def test_other_dropped_exceptions_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: weakref.ref[Thing]) -> None:
        raise ValueError("a bug")

    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(str(dropped.exc_value)))
    thing = Thing()
    reference = weakref.ref(thing, fail)
    before = sys.unraisablehook
    with interrupts_kept():
        del thing
    assert (told, reference()) == (["a bug"], None)
    assert sys.unraisablehook is before
    with pytest.raises(ZeroDivisionError), interrupts_kept():
        raise ZeroDivisionError
    assert sys.unraisablehook is before
