from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.cli.interrupts import import_interruptibly, interrupts_kept

# What PyTorch's compiled code does while it imports NumPy.
SWALLOWS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass
"""


class Thing:
    """Something that can be referred to weakly."""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background may have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sleep_in_parts() -> None:
    """Sleep for a minute. A signal that comes just before a sleep does not end it."""
    for _ in range(600):
        time.sleep(0.1)


def test_interrupt_in_a_callback_comes_again() -> None:
    def interrupted(_: weakref.ref[Thing]) -> None:
        raise KeyboardInterrupt

    things = [Thing()]
    reference = weakref.ref(things[0], interrupted)
    with interrupts_kept():
        things.clear()
        with pytest.raises(KeyboardInterrupt):
            sleep_in_parts()
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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "package_of_a_test.py"
    sys.modules.pop("package_of_a_test", None)


@pytest.mark.parametrize("then", ["", "raise ImportError('numpy')"])
def test_interrupt_that_an_import_swallows_is_raised_behind_it(package: Path, then: str) -> None:
    package.write_text(SWALLOWS + then)
    with pytest.raises(KeyboardInterrupt):
        import_interruptibly("package_of_a_test")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_import_without_an_interrupt_is_an_import(package: Path) -> None:
    package.write_text("value = 5")
    import_interruptibly("package_of_a_test")
    assert sys.modules["package_of_a_test"].value == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
