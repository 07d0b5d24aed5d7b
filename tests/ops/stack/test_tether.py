"""A command becomes the child that was started for it, whatever the environment says; `test_child` kills parents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.stack import tether


def test_modules_that_the_environment_puts_in_front_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise SystemExit(3)")
    command = tether.tethered(["sh", "-c", "echo $$ $PYTHONPATH"])
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.communicate(timeout=30)[0].split() == [str(child.pid), str(tmp_path)]
    assert child.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_nothing_is_started_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    command = tether.tethered(["touch", str(tmp_path / "started")])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, check=False, timeout=30).returncode == 127
    assert not (tmp_path / "started").exists()
