"""A mutant meets the tests of its file first."""

from __future__ import annotations

from pathlib import Path

from ops.mutation.covering import CoveringTests


def _write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_mirrored_tests_come_before_those_that_import_the_file_and_those_of_its_folder(tmp_path: Path) -> None:
    _write(tmp_path, "tests/gateway/dispatch/test_frames.py")
    _write(tmp_path, "tests/gateway/dispatch/test_frames_late.py")
    _write(tmp_path, "tests/gateway/dispatch/test_publisher.py")
    _write(tmp_path, "tests/gateway/dispatch/test_dispatcher.py", "from gateway.dispatch.frames import Frames")
    _write(tmp_path, "tests/gateway/api/test_chunks.py", "from gateway.dispatch import frames")
    _write(tmp_path, "tests/integration/test_cancellation.py")
    folder = "tests/gateway/dispatch"
    assert CoveringTests(tmp_path).of("gateway/dispatch/frames.py", "") == [
        [f"{folder}/test_frames.py", f"{folder}/test_frames_late.py"],
        [f"{folder}/test_dispatcher.py", "tests/gateway/api/test_chunks.py"],
        [f"{folder}/test_publisher.py", "tests/integration"],
    ]


def test_tests_of_other_folders_are_found_by_the_map(tmp_path: Path) -> None:
    (tmp_path / "tests/gpu_worker/engine").mkdir(parents=True)
    assert CoveringTests(tmp_path).of("gpu_worker/execution/step.py", "") == [["tests/gpu_worker/engine"]]


def test_file_of_a_folder_without_tests_meets_those_of_the_folder_around_it(tmp_path: Path) -> None:
    _write(tmp_path, "tests/shared/formats/test_hermes.py")
    _write(tmp_path, "tests/shared/test_messages.py")
    assert CoveringTests(tmp_path).of("shared/formats/parts/fixed.py", "") == [["tests/shared/formats/test_hermes.py"]]


def test_tests_that_speak_of_what_is_changed_come_first_in_their_stage(tmp_path: Path) -> None:
    _write(tmp_path, "tests/gateway/process/test_forks.py", "processes = 2")
    _write(tmp_path, "tests/gateway/process/test_scraping.py", 'settings = {"operator_port": 0}')
    covering = CoveringTests(tmp_path)
    folder = "tests/gateway/process"
    assert covering.of("gateway/process/gateway.py", "await parts.operator.start(listeners.operator)") == [
        [f"{folder}/test_scraping.py", f"{folder}/test_forks.py"]
    ]
    assert covering.of("gateway/process/gateway.py", "return Processes()")[0][0] == f"{folder}/test_forks.py"
