"""Run a command that dies with the process that started it, even when that one is killed with SIGKILL.

`tethered` puts this file before a command. As a script, `python -I -S tether.py PARENT_PID COMMAND...`, it ties itself
to the parent and becomes the command.
A script of its own rather than a `preexec_fn`, because Python code between fork and exec can deadlock on locks that
other threads held. It imports nothing of Headrace, so it starts in milliseconds. Other systems than Linux have no such
signal; there the command simply runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_EXIT_NOT_STARTED = 127


def tethered(command: Sequence[str]) -> list[str]:
    """Return the command as a child of this process that dies with it; its pid stays that of the child.

    The thread that starts it must live as long as it: the system takes the end of that thread for the parent's.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> int:
    """Become `arguments[1:]`, tied to the parent whose pid is `arguments[0]`; return only when that fails."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the tie was made.
        return _EXIT_NOT_STARTED
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
    return _EXIT_NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
