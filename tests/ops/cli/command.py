"""Run `headrace` as a user does."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from ops.cli import main
from tests.forked import fork_server

TIMEOUT_S = 60


def headrace(
    *arguments: str, given: str = "", cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `given` as its standard input and no `HEADRACE_*` variables but these.

    Its audit log goes nowhere unless they say where.
    """
    with tempfile.TemporaryDirectory() as folder:
        read, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        for file, text in ((read, given), (out, ""), (err, "")):
            file.write_text(text)
        server = fork_server("tests.ops.cli.preloaded")
        command = server.start(arguments, _environ(environ), cwd or Path.cwd(), (read, out, err))
        try:
            status = command.wait(TIMEOUT_S)
        finally:
            command.kill()
        return subprocess.CompletedProcess(["headrace", *arguments], status, out.read_text(), err.read_text())


def headrace_here(
    *arguments: str, given: str = "", cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as `headrace` does, but in this process, which is much quicker."""
    read, out, err = (io.TextIOWrapper(io.BytesIO(text), "utf-8") for text in (given.encode(), b"", b""))
    with (
        mock.patch.dict(os.environ, _environ(environ), clear=True),
        mock.patch.multiple(sys, argv=["headrace", *arguments], stdin=read, stdout=out, stderr=err),
        contextlib.chdir(cwd or Path.cwd()),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    told = []
    for stream in (out, err):
        stream.seek(0)
        told.append(stream.read())
    return subprocess.CompletedProcess(["headrace", *arguments], int(ended.value.code or 0), *told)


def _environ(changes: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return clean | {"HEADRACE_AUDIT_FILE": os.devnull} | changes
