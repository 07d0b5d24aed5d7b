"""A mutant meets the tests of its file first."""

from __future__ import annotations

from pathlib import Path

from ops.mutation.judge import CoveringTests


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
