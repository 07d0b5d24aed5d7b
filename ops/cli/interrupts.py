"""Ctrl-C where it is dropped, by Python or by compiled code.

`KeyboardInterrupt` is raised wherever the interpreter is. In a destructor or a callback of a weak reference, where it
often is after a long call of compiled code, an exception is printed and forgotten: Ctrl-C while a model was loaded
printed a traceback and stopped nothing. Such an interrupt is sent again a moment later.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Send interrupts again that were dropped within the block; other dropped exceptions are reported as before."""
    report = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs, /) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Later, and by another thread: here it would be dropped again.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            report(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report


def import_interruptibly(name: str) -> None:
    """Import a package that may drop a Ctrl-C; one that is pressed meanwhile is raised when the import ends.

    While PyTorch's compiled code imports NumPy, it drops any exception: one in ten interrupts during the import was
    lost, and a job of minutes went on.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        importlib.import_module(name)
        return
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda _number, _frame: interrupted.set())
    try:
        importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted.is_set():
            # Also in the place of an error that the import ended with.
            raise KeyboardInterrupt
