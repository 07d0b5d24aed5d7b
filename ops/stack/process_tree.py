"""The child processes of a process, and whether a process is stopped, where Linux tells it."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the pids of the processes that a process has started and that still run, oldest first."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:
            # The thread, and perhaps the process, has ended meanwhile.
            continue
    return sorted(found)


def is_stopped(pid: int) -> bool:
    """Whether a signal, SIGSTOP or the terminal's Ctrl-Z, has stopped a process; one under a debugger is not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The command's name stands in parentheses and may hold anything, spaces and parentheses too.
    return status.rpartition(")")[2].split()[0] == "T"
