"""A fork imports the project from the copy of the tree, whatever this process has imported, and leaves no process."""

from __future__ import annotations

import compileall
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ops.mutation import fork
from ops.mutation.fork import changed_file, prepare, run_forked


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fork, "_LIBRARIES", ())
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/__init__.py").touch()
    (tmp_path / "shared/clock.py").write_text("def now(): return 1\n")
    (tmp_path / "shared/reader.py").write_text("from shared.clock import now\ndef read(): return now()\n")
    # Written long before it is changed.
    os.utime(tmp_path / "shared/clock.py", (1e9, 1e9))
    compileall.compile_dir(tmp_path, quiet=2)
    prepare()
    return tmp_path


def _read() -> int:
    from shared.reader import read  # type: ignore[import-not-found]

    command = [sys.executable, "-c", "from shared.reader import read; print(read())"]
    sys.stdout.write(f"{read()} {subprocess.run(command, check=True, capture_output=True, text=True).stdout}")
    return 3


def test_changed_module_is_what_modules_that_import_it_and_started_processes_see(copy: Path) -> None:
    assert list(copy.rglob("clock.*.pyc"))
    assert "shared" in sys.modules
    assert run_forked(copy, _read, 30.0) == (3, "1 1\n")
    with changed_file(copy / "shared/clock.py", "def now(): return 2\n"):
        assert run_forked(copy, _read, 30.0) == (3, "2 2\n")
    assert run_forked(copy, _read, 30.0) == (3, "1 1\n")
    # This process goes on with its own modules.
    assert not hasattr(sys.modules["shared"], "clock")


def test_module_that_cannot_be_imported_is_an_exit_with_the_error(copy: Path) -> None:
    (copy / "shared/clock.py").write_text("raise ValueError('broken')\n")
    finished = run_forked(copy, _read, 30.0)
    assert finished is not None
    assert finished[0] == 1
    assert "ValueError: broken" in finished[1]


def _wait_for_end(number: Path) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(number.read_text())).wait(10)


def test_action_that_takes_too_long_leaves_no_process_in_a_session_of_its_own(copy: Path) -> None:
    number = copy / "pid"

    def wait() -> int:
        number.write_text(str(subprocess.Popen(["sleep", "60"], start_new_session=True).pid))
        time.sleep(60)
        return 0

    assert run_forked(copy, wait, 5.0) is None
    _wait_for_end(number)


def test_action_that_crashes_leaves_no_server(copy: Path) -> None:
    number = copy / "pid"

    def crash() -> int:
        process = subprocess.Popen(["sleep", "60"])
        number.write_text(str(process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    finished = run_forked(copy, crash, 30.0)
    assert finished is not None
    assert finished[0] < 0
    _wait_for_end(number)
