"""The clock shim: it moves the wall clock of a process, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.chaos.system import WallClock

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_PROGRAM = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def test_jump_moves_the_wall_clock_of_a_running_process_and_not_its_monotonic_clock(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    command = [sys.executable, "-c", _PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | clock.environ, **pipes) as process:  # type: ignore[call-overload]

        def look() -> tuple[float, float]:
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        for offset in (0, 3600, -3600):
            clock.jump(offset)
            wall, monotonic = look()
            assert abs(wall - offset) < 60
            assert abs(monotonic) < 60
