"""A process that has imported what others need, and forks for each: starting Python anew takes ten times as long.

`python -m tests.fork_server MODULE` reads one `Start` a line from its standard input, answers each with the pid of a
process that is MODULE's `run()`, and writes down how it ends. All processes that are left end with the standard input.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import sys
from collections.abc import Iterator

import msgspec


class Start(msgspec.Struct, frozen=True):
    """Arguments, the whole environment, the files that are the standard streams, and the file for the exit status."""

    arguments: list[str]
    environ: dict[str, str]
    cwd: str
    streams: tuple[str, str, str]
    ending: str


def serve() -> Start | None:
    """Fork until the standard input ends; return what to start in each process that was forked, and None here."""
    commands, answers = os.dup(0), os.dup(1)
    ended, child_ended = os.pipe()
    os.set_blocking(child_ended, False)
    signal.set_wakeup_fd(child_ended)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    endings: dict[int, str] = {}
    for line in _lines(commands, ended, endings):
        start = msgspec.json.decode(line, type=Start)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in (commands, answers, ended, child_ended):
                os.close(file)
            return start
        endings[pid] = start.ending
        os.write(answers, b"%d\n" % pid)
    for pid in endings:
        os.kill(pid, signal.SIGKILL)
    return None


def _lines(commands: int, ended: int, endings: dict[int, str]) -> Iterator[bytes]:
    """Yield lines until there are no more, and write down meanwhile how processes end."""
    with selectors.DefaultSelector() as selector:
        for file in (commands, ended):
            selector.register(file, selectors.EVENT_READ)
        received = b""
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd == ended:
                    _reap(endings)
                elif not data:
                    return
                else:
                    *lines, received = (received + data).split(b"\n")
                    yield from lines


def _reap(endings: dict[int, str]) -> None:
    for pid in list(endings):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ending = endings.pop(pid)
            with open(f"{ending}.new", "w", encoding="ascii") as file:
                file.write(str(os.waitstatus_to_exitcode(status)))
            os.replace(f"{ending}.new", ending)


def become(start: Start) -> None:
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.environ)
    for number, path in enumerate(start.streams):
        file = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = start.arguments


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    # Collections in the processes that are forked pass over what was imported, whose memory stays shared.
    gc.freeze()
    if (asked := serve()) is not None:
        become(asked)
        sys.exit(module.run())
