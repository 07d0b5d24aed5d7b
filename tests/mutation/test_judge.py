"""What counts as noticed: a failure that comes again, and only with the mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation.judge import Judge, Notice, Turns
from tests.mutation.runner import Outcome, outcome_of

ROOT = Path(__file__).resolve().parents[2]

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
    ("status", "notes", "outcome"),
    [
        (0, ["started a", "ended a"], Outcome(0, None, is_of_time=False)),
        # All tests were left out: nothing failed.
        (5, [], Outcome(5, None, is_of_time=False)),
        (1, ["started a", "ended a", "started b c", "failed b c"], Outcome(1, "b c", is_of_time=False)),
        (1, ["started a", "late a"], Outcome(1, "a", is_of_time=True)),
        (2, ["failed test_a.py"], Outcome(2, "test_a.py", is_of_time=False)),
        (-11, ["started a", "ended a", "started b"], Outcome(-11, "b", is_of_time=False)),
        (None, ["started a", "ended a", "started b"], Outcome(None, "b", is_of_time=True)),
        (4, [], Outcome(4, None, is_of_time=False)),
    ],
)
def test_first_failure_is_read_from_what_a_run_wrote(status: int | None, notes: list[str], outcome: Outcome) -> None:
    assert outcome_of(status, notes) == outcome
    assert outcome.has_passed == (status in (0, 5))


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "sample.py").write_text(SOURCE)
    (tmp_path / "test_sample.py").write_text(TESTS)
    judge = Judge(tmp_path, Turns())
    yield judge
    judge.close()
    assert (tmp_path / "sample.py").read_text() == SOURCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutated", "test", "notice"),
    [
        ("def value(): return 2\n", "test_value", Notice("test_sample.py::test_value", is_of_time=False)),
        ("def value(): return 3\n", "test_late", Notice("test_sample.py::test_late", is_of_time=True)),
        ("raise ValueError\n", "test_value", Notice("test_sample.py", is_of_time=False)),
        ("def value(): return 4\n", "test_value", None),
        # Fails once because the machine is busy, and is the only test.
        ("def value(): return 2\n", "test_busy", None),
        ("def value(): return 2\n", "test_broken", None),
    ],
    ids=["a failure", "a time-out", "no import", "a survivor", "a busy machine", "a test that fails anyway"],
)
def test_mutant_is_noticed_by_what_fails_again_and_only_with_it(
    judge: Judge, mutated: str, test: str, notice: Notice | None
) -> None:
    assert judge.notice("sample.py", mutated, [f"test_sample.py::{test}"]) == notice
