from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from ops.stack import supervisor as supervisor_module
from ops.stack.config import UpConfig
from ops.stack.console import Console
from ops.stack.plan import make_plan
from ops.stack.state import ReadyFile, StateDirectory, read_ready_file
from ops.stack.supervisor import Supervisor
from shared.config import resolve


def test_ready_file_that_cannot_be_written_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, say. It raised within a child's own task: that child was never started again."""
    state = StateDirectory(tmp_path)
    said = io.StringIO()
    plan = make_plan(resolve(UpConfig, {"port": "0"}, {}), state, {})
    running = Supervisor(plan, state, None, Console(said), hang_timeout_s=10)

    def refuse(path: Path, readiness: ReadyFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(supervisor_module, "write_ready_file", refuse)
        running._write_ready_files()
        running._write_ready_files()
    assert said.getvalue().count("ready.json cannot be written: No space left on device") == 1
    running._write_ready_files()
    found = read_ready_file(tmp_path)
    assert found is not None
    assert found.url == plan.url
    state.close()
