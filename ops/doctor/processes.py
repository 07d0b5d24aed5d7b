"""The processes of the system that is looked at, as far as they run on this machine: which stand still, which are gone.

Linux tells it; elsewhere nothing is said of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.doctor.finding import Finding, problem, warning
from ops.stack.process_tree import is_stopped
from ops.stack.state import ReadyFile, holder_of

_PARTS = ("up", "gateway", "worker")
_PROC = Path("/proc")
# Options of Python may stand before the name of the module.
_MOST_WORDS_BEFORE = 5


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the system: `part` is its command's name, or that of a server."""

    pid: int
    part: str

    @property
    def is_there(self) -> bool:
        """Whether it still runs, or stands still."""
        return (_PROC / str(self.pid)).exists()


def process_findings(state_dir: Path, running: ReadyFile | None, nats_url: str | None) -> Iterator[Finding]:
    """Yield what there is to say of the processes of one system.

    Args:
        state_dir: Of the `headrace up` that is looked at.
        running: Its ready file, if it has one.
        nats_url: The NATS that is looked at: who was told of it belongs to the system too.
    """
    if not (_PROC / "self").exists():
        return
    found = dict(_of_state(state_dir, running)) if running else {}
    found |= {pid: part for pid, part in _of_nats(nats_url) if pid not in found} if nats_url else {}
    processes = [Process(pid, part) for pid, part in sorted(found.items())]
    up = next((process for process in processes if process.part == "up" and not process.is_there), None)
    if up is not None:
        yield warning(
            "processes",
            f"the `headrace up` of {state_dir} (process {up.pid}) has ended without stopping its parts",
            "start it anew",
        )
    there = [process for process in processes if process.is_there]
    still = [process for process in there if is_stopped(process.pid)]
    for process in still:
        text = f"{process.part} {process.pid} stands still: a signal has stopped it (Ctrl-Z, or SIGSTOP)"
        yield problem("processes", text, f"`kill -CONT {process.pid}`, or `fg` in the terminal that it was started in")
    if there and not still:
        yield Finding("processes", ", ".join(f"{process.part} {process.pid}" for process in there))


def _of_state(state_dir: Path, running: ReadyFile) -> Iterator[tuple[int, str]]:
    """Yield the processes that a `headrace up` has written down, and itself."""
    for role, pids in running.pids.items():
        for pid in pids:
            yield pid, role
    if (holder := holder_of(state_dir)) is not None:
        yield holder, "up"


def _of_nats(nats_url: str) -> Iterator[tuple[int, str]]:
    """Yield the processes of Headrace whose command line or environment names one of these servers."""
    places = [re.split(r"://|@", url.strip())[-1].rstrip("/") for url in nats_url.split(",")]
    for folder in _PROC.glob("[0-9]*"):
        words = _words(folder / "cmdline")
        part = _part(words)
        if part is None:
            continue
        told = " ".join([*words, *_words(folder / "environ")])
        if any(place and place in told for place in places):
            yield int(folder.name), part


def _part(words: list[str]) -> str | None:
    """Return which part of Headrace a command line starts; None for one that is not of a part."""
    if not words:
        return None
    is_python = Path(words[0]).name.startswith("python")
    for index, word in enumerate(words[:_MOST_WORDS_BEFORE]):
        is_command = Path(word).name == "headrace" and (index == 0 or (is_python and index == 1))
        if is_command or words[index - 1 : index + 1] == ["-m", "ops.cli"]:
            following = words[index + 1 : index + 2]
            return following[0] if following and following[0] in _PARTS else None
    return None


def _words(file: Path) -> list[str]:
    try:
        return [word for word in file.read_bytes().decode(errors="replace").split("\0") if word]
    except OSError:  # it has ended, or is another user's
        return []
