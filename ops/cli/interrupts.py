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
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01
_IMPORT_AGAIN_S = 0.2


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
    """Import a package that may drop a Ctrl-C, and let Ctrl-C end the import all the same.

    While PyTorch's compiled code imports NumPy, it drops any exception: one in ten interrupts during the import was
    lost, and a job of minutes went on.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        importlib.import_module(name)
        return
    interrupts = _ImportInterrupts()
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        importlib.import_module(name)
    finally:
        interrupts.end()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts.were_noted:
            # Also in the place of an error that the interrupt was made into.
            raise KeyboardInterrupt


class _ImportInterrupts:
    """Raises interrupts, again and again until they end the import.

    Attributes:
        were_noted: Whether there was one.
    """

    def __init__(self) -> None:
        self.were_noted = False
        self._is_over = False
        self._lock = threading.Lock()

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self.were_noted = True
        if not self._is_over:
            again = threading.Timer(_IMPORT_AGAIN_S, self._raise_again)
            again.daemon = True
            again.start()
            raise KeyboardInterrupt

    def end(self) -> None:
        """Let no further one be raised; one that is under way is only noted."""
        self._is_over = True
        with self._lock:
            return

    def _raise_again(self) -> None:
        with self._lock:
            if not self._is_over:
                # To the main thread itself, which may be waiting in a call of the system.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
