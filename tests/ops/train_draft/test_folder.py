from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ops.train_draft.folder import write_draft
from ops.train_draft.job import check_job, train_draft, train_on
from ops.train_draft.material import prepare
from ops.train_draft.student import Student
from shared.errors import ConfigError
from tests.ops.train_draft.conftest import JobMaker, ignore


def test_folder_with_something_in_it_is_not_overwritten(job: JobMaker) -> None:
    one = job("eagle")
    one.out.mkdir()
    (one.out / "precious").write_text("mine")

    with pytest.raises(ConfigError, match="exists and is not empty; name a new folder"):
        check_job(one)


def test_folder_that_cannot_be_made_is_refused_before_training(job: JobMaker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    one = job("eagle", "file/deep/draft")

    with pytest.raises(ConfigError, match=f"since {tmp_path / 'file'} cannot be written; name another one"):
        check_job(one)


def test_link_that_leads_nowhere_is_refused_before_training(job: JobMaker, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")

    for out in ("link", "link/draft"):
        with pytest.raises(ConfigError, match=f"{tmp_path / 'link'} is a link that leads nowhere; name a new folder"):
            check_job(job("eagle", out))


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("a" * 300, r"has a name of 300 bytes, 'a{20}'\.\.\.; this disk takes 255 at most"),
        ("none/" + "a" * 300, "has a name of 300 bytes"),
        ("a/" * 2100, r"needs paths of \d+ bytes; the system takes 4095 at most"),
    ],
)
def test_names_that_are_too_long_are_refused_before_training(job: JobMaker, out: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^HEADRACE_OUT: {problem}"):
        check_job(job("eagle", out))


def test_full_disk_is_told_before_training(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job("eagle")
    material = prepare(one.material, ignore)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))

    with pytest.raises(ConfigError, match="has 1000 bytes free; the draft needs 78 KB: free some"):
        train_on(material, one, ignore)


class Numbers:
    """A student that was trained to be one tensor."""

    first_distance = 2

    def config(self) -> dict[str, int]:
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"fc.weight": torch.ones(4)}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_writing_that_fails_leaves_nothing_that_is_taken_for_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise error

    student: Student = Numbers()  # type: ignore[assignment]
    monkeypatch.setattr("ops.train_draft.folder.save_file", fail)
    with pytest.raises((ConfigError, KeyboardInterrupt), match=r"No space left on device; free some|^$"):
        write_draft(student, tmp_path, tmp_path / "draft")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("failing", ["shutil.copyfile", "json.dumps", "Path.rename"])
def test_draft_that_was_interrupted_can_be_written_by_the_same_command(
    job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, is_there: bool
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    one = job("model", "out/draft")
    if is_there:
        one.out.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(f"ops.train_draft.folder.{failing}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_draft(one, ignore)

    assert list((tmp_path / "out").rglob("*")) == [one.out] * is_there
    train_draft(one, ignore)
    names = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in one.out.iterdir()} == names
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["draft"]
    assert one.out.stat().st_mode & 0o777 == (tmp_path / "out").stat().st_mode & 0o777


@pytest.mark.parametrize("is_writing", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_folder_that_another_run_fills_meanwhile_is_not_overwritten(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch, is_there: bool, is_writing: bool
) -> None:
    one = job("medusa")
    theirs = one.out / "model.safetensors"

    def fill(*_: object, **__: object) -> str:
        one.out.mkdir(exist_ok=True)
        theirs.write_bytes(b"another run's")
        return "{}"

    if is_there:
        one.out.mkdir()
    if is_writing:
        monkeypatch.setattr("ops.train_draft.folder.json.dumps", fill)
    else:
        monkeypatch.setattr("ops.train_draft.job.write_draft", lambda *given: (fill(), write_draft(*given)))
    with pytest.raises(ConfigError, match=r"(?i)not empty"):
        train_draft(one, ignore)

    assert list(one.out.iterdir()) == [theirs]
    assert theirs.read_bytes() == b"another run's"
    assert [path for path in one.out.parent.iterdir() if path.suffix == ".part"] == []
