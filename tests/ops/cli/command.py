"""Run `headrace` as a user does."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import msgspec

from tests.ops.cli.command_server import Command

TIMEOUT_S = 60


def headrace(
    *arguments: str, given: str = "", cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `given` as its standard input and no `HEADRACE_*` variables but these.

    Its audit log goes nowhere unless they say where.
    """
    environ = {"HEADRACE_AUDIT_FILE": os.devnull, **environ}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("in", "out", "err")]
        for file, text in zip(files, (given, "", ""), strict=True):
            file.write_text(text)
        streams = (str(files[0]), str(files[1]), str(files[2]))
        command = Command(list(arguments), clean | environ, str(cwd or Path.cwd()), streams)
        return subprocess.CompletedProcess(
            ["headrace", *arguments], _exit_status(command), files[1].read_text(), files[2].read_text()
        )


def _exit_status(command: Command) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(msgspec.json.encode(command) + b"\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], TIMEOUT_S)[0]:
        server.kill()
        # One command that hangs fails its own test, and not all that come after it.
        _server.cache_clear()
        raise subprocess.TimeoutExpired(command.arguments, TIMEOUT_S)
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[bytes]:
    """The process that runs all commands of this session; it ends with its standard input."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.cli.command_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    atexit.register(server.communicate)
    return server
