"""The end of a process that does not leave a step in which a rank was lost: who waits for a GPU may never be told."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading

_log = logging.getLogger(__name__)


def exit_within(seconds: float) -> threading.Timer:
    """End this process with status 1 if it has not ended by itself by then, unless the timer is cancelled."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()
    return timer


def _exit() -> None:
    _log.error("this process did not leave its step in time: it ends")
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    os._exit(1)
