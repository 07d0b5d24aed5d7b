"""What counts as noticed: a failure that comes again, and only with the mutant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.mutation.judge import (
    CoveringTests,
    Failure,
    Judge,
    Verdict,
    first_failure,
    is_goal_reached,
    report,
    share_noticed,
    share_unfinished,
    verdict_of,
)

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
    ("status", "output", "failed"),
    [
        (0, "1 passed", None),
        # All tests were left out: none failed.
        (5, "no tests ran", None),
        (1, "/a/x.py:3: AssertionError\nFAILED t.py::b - assert 1", Failure(Verdict.TESTS, "t.py::b")),
        (1, "/a/x.py:3: TypeError: f() missing 1 required\nFAILED t.py::b", Failure(Verdict.CRASHED, "t.py::b")),
        (1, "/a/x.py:3: Failed: Timeout (>60.0s)\nFAILED t.py::b", Failure(Verdict.TIME, "t.py::b")),
        (1, "FAILED t.py::b[a c] - assert [1] == [2]", Failure(Verdict.TESTS, "t.py::b[a c]")),
        (2, "ERROR t.py - ValueError", Failure(Verdict.TESTS, "t.py")),
        (-11, "", Failure(Verdict.TESTS, "asked.py")),
    ],
)
def test_first_failure_is_read_from_what_a_run_printed(status: int, output: str, failed: Failure | None) -> None:
    assert first_failure(status, output, "asked.py") == failed


def _take(one: int) -> int:
    return one


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        (lambda: _take(), Verdict.CRASHED),  # type: ignore[call-arg]
        (lambda: _take(1, 2), Verdict.CRASHED),  # type: ignore[call-arg]
        (lambda: len(), Verdict.CRASHED),  # type: ignore[call-arg]
        (lambda: isinstance(1), Verdict.CRASHED),  # type: ignore[call-arg]
        (lambda: dict.fromkeys(), Verdict.CRASHED),  # type: ignore[call-overload]
        (lambda: int.from_bytes(), Verdict.CRASHED),  # type: ignore[call-arg]
        (lambda: [a for a, _ in [(1,)]], Verdict.CRASHED),  # type: ignore[misc]
        (lambda: [a for a, _ in [(1, 2, 3)]], Verdict.CRASHED),  # type: ignore[misc]
        (lambda: no_such_name, Verdict.CRASHED),  # type: ignore[name-defined] # noqa: F821
        (lambda: 1 + "1", Verdict.TESTS),  # type: ignore[operator]
        (lambda: "".index("missing"), Verdict.TESTS),
        (lambda: asyncio.run(asyncio.wait_for(asyncio.sleep(1), 0)), Verdict.TIME),
    ],
)
def test_crash_is_what_every_test_of_the_line_would_see(action: Callable[[], object], verdict: Verdict) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    assert verdict_of(caught.exconly(), Path("gateway/config.py")) == verdict
    if verdict is Verdict.CRASHED:
        assert verdict_of(caught.exconly(), Path("tests/gateway/test_config.py")) is Verdict.TESTS


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    (tmp_path / "sample.py").write_text(SOURCE)
    (tmp_path / "test_sample.py").write_text(TESTS)
    judge = Judge(tmp_path)
    yield judge
    assert (tmp_path / "sample.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("mutated", "test", "failure"),
    [
        ("def value(): return 2\n", "test_value", Failure(Verdict.TESTS, "test_sample.py::test_value")),
        ("def value(): return 3\n", "test_late", Failure(Verdict.TIME, "test_sample.py::test_late")),
        ("def value(): return len()\n", "test_value", Failure(Verdict.CRASHED, "test_sample.py::test_value")),
        ("raise ValueError\n", "test_value", Failure(Verdict.TESTS, "test_sample.py")),
        ("def value(): return 4\n", "test_value", None),
        # Fails once because the machine is busy, and is the only test.
        ("def value(): return 2\n", "test_busy", None),
        ("def value(): return 2\n", "test_broken", None),
    ],
    ids=["a failure", "a time-out", "a crash", "no import", "a survivor", "a busy machine", "a test that fails anyway"],
)
def test_mutant_is_noticed_by_what_fails_again_and_only_with_it(
    judge: Judge, mutated: str, test: str, failure: Failure | None
) -> None:
    assert judge.failure("sample.py", mutated, [f"test_sample.py::{test}"], 60.0) == failure


def test_mutant_whose_tests_did_not_get_to_their_end_has_not_survived(judge: Judge) -> None:
    failed = judge.failure("sample.py", "def value(): return 2\n", ["test_sample.py::test_value"], 0.0)
    assert failed == Failure(Verdict.UNFINISHED, "test_sample.py::test_value")


def _write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_mirrored_tests_come_before_those_that_import_the_file_and_those_of_its_folder(tmp_path: Path) -> None:
    _write(tmp_path, "tests/gateway/dispatch/test_frames.py")
    _write(tmp_path, "tests/gateway/dispatch/test_frames_late.py")
    _write(tmp_path, "tests/gateway/dispatch/test_publisher.py")
    _write(tmp_path, "tests/gateway/dispatch/test_dispatcher.py", "from gateway.dispatch.frames import Frames")
    _write(tmp_path, "tests/gateway/api/test_chunks.py", "from gateway.dispatch import frames")
    folder = "tests/gateway/dispatch"
    assert CoveringTests(tmp_path).of("gateway/dispatch/frames.py") == [
        [f"{folder}/test_frames.py", f"{folder}/test_frames_late.py"],
        [f"{folder}/test_dispatcher.py", "tests/gateway/api/test_chunks.py"],
        [f"{folder}/test_publisher.py"],
    ]


def test_file_of_a_folder_without_tests_meets_those_of_the_folder_around_it(tmp_path: Path) -> None:
    _write(tmp_path, "tests/shared/formats/test_hermes.py")
    _write(tmp_path, "tests/shared/test_messages.py")
    assert CoveringTests(tmp_path).of("shared/formats/parts/fixed.py") == [["tests/shared/formats/test_hermes.py"]]


def test_file_that_many_import_meets_a_few_of_them(tmp_path: Path) -> None:
    for number in range(20):
        _write(tmp_path, f"tests/gateway/test_{number}.py", "import shared.errors")
    assert list(map(len, CoveringTests(tmp_path).of("shared/errors.py"))) == [12]


@pytest.mark.parametrize(
    ("counts", "noticed", "unfinished", "is_reached"),
    [
        ({Verdict.TESTS: 7, Verdict.TIME: 1, Verdict.TYPES: 1, Verdict.SURVIVED: 1}, 0.9, 0.0, True),
        ({Verdict.TESTS: 8, Verdict.SURVIVED: 1}, 8 / 9, 0.0, False),
        ({Verdict.TESTS: 9, Verdict.UNFINISHED: 1}, 1.0, 0.1, True),
        # Seven of nine noticed ones would be 100 % of those that came to an end.
        ({Verdict.TESTS: 7, Verdict.UNFINISHED: 2}, 1.0, 2 / 9, False),
        ({Verdict.UNFINISHED: 3}, None, 1.0, False),
        # Mutants without effect make neither share smaller.
        ({Verdict.TESTS: 1, Verdict.UNFINISHED: 1, Verdict.CRASHED: 9, Verdict.EQUIVALENT: 9}, 1.0, 0.5, False),
        ({Verdict.CRASHED: 2, Verdict.EQUIVALENT: 1}, None, 0.0, True),
    ],
)
def test_goal_needs_noticed_mutants_and_few_unfinished_ones(
    counts: dict[Verdict, int], noticed: float | None, unfinished: float, is_reached: bool
) -> None:
    counted = Counter(counts)
    assert share_noticed(counted) == (None if noticed is None else pytest.approx(noticed))
    assert share_unfinished(counted) == pytest.approx(unfinished)
    assert is_goal_reached(counted) == is_reached


def test_report_shows_both_shares_and_names_the_rooms_that_missed_the_goal() -> None:
    rooms = {
        "gateway.fleet": Counter({Verdict.TESTS: 10}),
        "gateway.files": Counter({Verdict.TESTS: 3, Verdict.UNFINISHED: 1}),
        "gateway.usage": Counter({Verdict.TESTS: 1, Verdict.SURVIVED: 1}),
    }
    _, fleet, files, usage, goal = report(rooms).splitlines()
    assert [line.split()[-2:] for line in (fleet, files, usage)] == [["0%", "100%"], ["25%", "100%"], ["0%", "50%"]]
    assert goal.endswith("at most 10% unfinished; missed: gateway.files, gateway.usage")
