"""The child processes of a process, where Linux tells them."""

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
