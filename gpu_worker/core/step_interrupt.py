"""Lets another thread end the step that a runner computes, before it is done."""

from __future__ import annotations

import ctypes
import threading
import time

from shared.errors import HeadraceError

_ASKED, _RUNNING = 0, 1


class StepGivenUpError(HeadraceError):
    """A step was ended before it was done. What it wrote into blocks will be written again."""

    def __init__(self) -> None:
        super().__init__("the step was given up for another client's first token")


class StepInterrupt:
    """The number of the step that was asked to end, and of the running one, which ends when the two are equal.

    So a request that comes too late does nothing, not even to one for a later step: a decoder may have ended for that
    already. Compiled code reads the numbers, too.
    """

    def __init__(self) -> None:
        self._steps = (ctypes.c_int64 * 2)()
        self._steps[_ASKED] = -1
        self._asking = threading.Lock()
        self._was_asked = threading.Event()

    @property
    def address(self) -> int:
        """Where the two numbers are, as int64; they live as long as this object."""
        return ctypes.addressof(self._steps)

    @property
    def is_asked(self) -> bool:
        """Return whether the step that is computed should end."""
        return self._steps[_ASKED] == self._steps[_RUNNING]

    def ask(self, step: int) -> None:
        """Ask for the end of a step; any thread may call it."""
        with self._asking:
            self._steps[_ASKED] = max(step, self._steps[_ASKED])
        self._was_asked.set()

    def clear(self) -> None:
        """Forget the request: steps are numbered anew."""
        self._steps[_ASKED] = -1

    def begin(self, step: int) -> None:
        """Say which step is computed from now on; called by the thread that computes."""
        self._steps[_RUNNING] = step

    def check(self) -> None:
        """Raise `StepGivenUpError` if the step should end."""
        if self._steps[_ASKED] == self._steps[_RUNNING]:
            raise StepGivenUpError

    def sleep(self, seconds: float) -> None:
        """Sleep; raise `StepGivenUpError` as soon as the step should end."""
        due = time.monotonic() + seconds
        while (left := due - time.monotonic()) > 0:
            self._was_asked.clear()
            self.check()
            self._was_asked.wait(left)
        self.check()
