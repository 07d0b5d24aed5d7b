"""Folders of killed processes are removed by the next process, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.files import TemporaryFolder

PREFIX = "headrace-test-"


@pytest.fixture(autouse=True)
def folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def make_in_another_process(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    code = f"""if True:
        from shared.files import TemporaryFolder
        folder = TemporaryFolder({PREFIX!r})
        print(folder.name, flush=True)
        input()
    """
    environment = os.environ | {"TMPDIR": str(directory)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600.0,) * 2)


def test_leftover_of_a_killed_process_is_removed_and_the_folder_of_a_living_one_stays(tmp_path: Path) -> None:
    process, folder = make_in_another_process(tmp_path)
    with process:
        (folder / "adapter").write_bytes(b"weights")
        age(folder)
        with TemporaryFolder(PREFIX):
            assert (folder / "adapter").exists()
        process.kill()
        process.wait()
        assert (folder / "adapter").exists()
        with TemporaryFolder(PREFIX) as own:
            assert [str(left) for left in tmp_path.iterdir()] == [own]
    assert not any(tmp_path.iterdir())


def test_nothing_but_old_folders_with_the_prefix_is_removed(tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "target"
    new, linked, pipe = (tmp_path / f"{PREFIX}{name}" for name in ("new", "linked", "pipe"))
    for folder in (other, target, new):
        folder.mkdir()
    linked.symlink_to(target)
    os.mkfifo(pipe)
    for folder in (other, target):
        age(folder)
    with TemporaryFolder(PREFIX):
        pass
    assert set(tmp_path.iterdir()) == {other, target, new, linked, pipe}


def test_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs := tmp_path / f"{PREFIX}theirs").mkdir()
    age(theirs)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with TemporaryFolder(PREFIX, tmp_path):
        assert theirs.exists()
