"""Runs what builds an engine for a GPU in a thread that has ended before the engine's own begins.

A thread has a cuBLAS handle, made with its first product, and workspaces of some 32 MB with that. PyTorch hands a
thread's handle on when the thread ends: so the engine's thread gets the one that warmed up, whose memory was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")


def run_in_ended_thread(build: Callable[[], _Result]) -> _Result:
    """Call `build`, and return what it returns, or raise what it raises, when its thread is gone."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(build())
        except BaseException as error:
            outcome.set_exception(error)

    # A worker that is stopped while it loads ends at once.
    thread = Thread(target=run, name="build", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
