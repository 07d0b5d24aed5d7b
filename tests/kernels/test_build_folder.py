"""Locks on the folders of builds, and what is removed of builds that were killed."""

from __future__ import annotations

import fcntl
import os
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
    (tmp_path / "cpu-kernels-build-new").mkdir()
    with build_folder.lock(tmp_path):
        build_folder.tidy(tmp_path)
    assert (tmp_path / "cpu-kernels-build-new").exists()
    build_folder.tidy(tmp_path)
    assert not (tmp_path / "cpu-kernels-build-new").exists()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "cpu-kernels-build-other").mkdir()
    build_folder.tidy(tmp_path)
    build_folder.remove_abandoned(tmp_path)
    assert (tmp_path / "cpu-kernels-build-other").exists()


def test_what_others_have_built_in_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "build-release").mkdir()
    build_folder.tidy(tmp_path)
    assert (tmp_path / "build-release").exists()


def test_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu-kernels-build-theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    build_folder.tidy(tmp_path)
    assert (tmp_path / "cpu-kernels-build-theirs").exists()


@pytest.mark.timeout(20)
def test_what_is_no_folder_is_neither_opened_nor_followed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "cpu-kernels-build-abandoned").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    (cache / "cpu-kernels-build-link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(cache / "cpu-kernels-build-pipe")
    build_folder.tidy(cache)
    assert (tmp_path / "elsewhere" / "kept").exists()
    assert sorted(path.name for path in cache.iterdir()) == ["cpu-kernels-build-link", "cpu-kernels-build-pipe"]
