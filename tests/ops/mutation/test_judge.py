"""What counts as noticed: a failure that comes again, and only with the mutant."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ops.mutation.judge import Failure, Judge, first_failure, kill_with_descendants

ROOT = Path(__file__).resolve().parents[3]

TESTS = """
import pathlib
import sample

def fails_once():
    mark = pathlib.Path(__file__).with_name("has_failed")
    if not mark.exists():
        mark.touch()
        raise AssertionError

def test_value(): assert sample.value() != 2
def test_late():
    if sample.value() == 3:
        raise TimeoutError
def test_busy(): fails_once()
def test_broken(): assert False
"""
SOURCE = "def value():\n    return 1\n"


@pytest.mark.parametrize(
    ("status", "notes", "failed"),
    [
        (0, ["started a", "ended a"], None),
        # All tests were left out: none failed.
        (5, [], None),
        (1, ["started a", "ended a", "started b c", "failed b c"], ("b c", False)),
        (1, ["started a", "late a"], ("a", True)),
        (2, ["failed test_a.py"], ("test_a.py", False)),
        (-11, ["started a", "ended a", "started b"], ("b", False)),
        (None, ["started a", "ended a", "started b"], ("b", True)),
        (None, [], None),
        (4, [], (None, False)),
    ],
)
def test_first_failure_is_read_from_what_a_run_wrote(
    status: int | None, notes: list[str], failed: tuple[str | None, bool] | None
) -> None:
    assert first_failure(status, notes) == failed


def test_run_that_takes_too_long_leaves_no_process_in_a_session_of_its_own() -> None:
    inner = "import time; time.sleep(60)"
    outer = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True).pid, flush=True); {inner}"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        kill_with_descendants(process.pid)
        assert process.wait(10) == -signal.SIGKILL
    started.wait(10)


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "sample.py").write_text(SOURCE)
    (tmp_path / "test_sample.py").write_text(TESTS)
    judge = Judge(tmp_path)
    yield judge
    judge.close()
    assert (tmp_path / "sample.py").read_text() == SOURCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutated", "test", "failure"),
    [
        ("def value(): return 2\n", "test_value", Failure("test_sample.py::test_value", is_of_time=False)),
        ("def value(): return 3\n", "test_late", Failure("test_sample.py::test_late", is_of_time=True)),
        ("raise ValueError\n", "test_value", Failure("test_sample.py", is_of_time=False)),
        ("def value(): return 4\n", "test_value", None),
        # Fails once because the machine is busy, and is the only test.
        ("def value(): return 2\n", "test_busy", None),
        ("def value(): return 2\n", "test_broken", None),
    ],
    ids=["a failure", "a time-out", "no import", "a survivor", "a busy machine", "a test that fails anyway"],
)
def test_mutant_is_noticed_by_what_fails_again_and_only_with_it(
    judge: Judge, mutated: str, test: str, failure: Failure | None
) -> None:
    assert judge.failure("sample.py", mutated, [f"test_sample.py::{test}"], 60.0) == failure
