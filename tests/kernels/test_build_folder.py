"""Locks on the folders of builds, and what is removed of builds that were killed."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from kernels import build_folder


def test_folder_is_locked_for_others_until_the_end(tmp_path: Path) -> None:
    with build_folder.lock(tmp_path) as is_locked:
        assert is_locked
        with pytest.raises(BlockingIOError), build_folder.lock(tmp_path):
            pass
    with build_folder.lock(tmp_path) as is_locked:
        assert is_locked


def test_workplace_is_removed_in_the_end(tmp_path: Path) -> None:
    with build_folder.workplace(tmp_path) as workplace:
        (workplace / "0.o").write_text("")
        build_folder.tidy(tmp_path)
        assert (workplace / "0.o").exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_build_that_runs_is_left_alone_although_it_is_not_locked_yet(tmp_path: Path) -> None:
    (tmp_path / "build-new").mkdir()
    with build_folder.lock(tmp_path):
        build_folder.tidy(tmp_path)
    assert (tmp_path / "build-new").exists()
    build_folder.tidy(tmp_path)
    assert not (tmp_path / "build-new").exists()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "build-other").mkdir()
    build_folder.tidy(tmp_path)
    build_folder.remove_abandoned(tmp_path)
    assert (tmp_path / "build-other").exists()
