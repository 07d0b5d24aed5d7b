"""Run `headrace` as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def headrace(
    *arguments: str, given: str = "", cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `given` as its standard input and no `HEADRACE_*` variables but these.

    Its audit log goes nowhere unless they say where.
    """
    environ = {"HEADRACE_AUDIT_FILE": os.devnull, **environ}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", *arguments],
        input=given,
        capture_output=True,
        text=True,
        env=clean | environ,
        cwd=cwd,
        timeout=60,
    )
