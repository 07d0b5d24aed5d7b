"""Run `headrace` as a user does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.forked import fork_server

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
        read, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        for file, text in ((read, given), (out, ""), (err, "")):
            file.write_text(text)
        server = fork_server("tests.ops.cli.preloaded" + ("_worker" if arguments[:1] == ("worker",) else ""))
        command = server.start(arguments, clean | environ, cwd or Path.cwd(), (read, out, err))
        try:
            status = command.wait(TIMEOUT_S)
        finally:
            command.kill()
        return subprocess.CompletedProcess(["headrace", *arguments], status, out.read_text(), err.read_text())
