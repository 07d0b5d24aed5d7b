"""Ctrl-C where Python drops it.

`KeyboardInterrupt` is raised wherever the interpreter is. In a destructor or a callback of a weak reference, which is
where it often is after a long call of compiled code, an exception is printed and forgotten: whoever pressed Ctrl-C
while a model was loaded waited on, below a traceback. Such an interrupt is sent again a moment later.
"""

from __future__ import annotations

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
    """Send interrupts again that were dropped within the block; other dropped exceptions are told as before."""
    told = sys.unraisablehook

    def hook(dropped: UnraisableHookArgs, /) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Later, and by another thread: here it would be dropped again.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            told(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = told
